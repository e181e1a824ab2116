// One operation as calls of NCCL's: packing and the calls themselves, and what is left to copy afterwards.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "operation/operation.h"
#include "planes/fusion.h"
#include "planes/nccl/nccl_communicator.h"
#include "planes/nccl/rows.h"

namespace horovodish {

// Why NCCL cannot do what a request asks for; empty when it can. The same on all ranks that ask for the same.
std::string problem_for_nccl(Kind kind, ReduceOp op, const std::vector<DType>& dtypes, double prescale,
                             double postscale);
std::string problem_for_nccl(const Request& request);
// Whether a request multiplies its values.
bool is_scaled(const Request& request);

struct DeviceCopy {
  std::byte* target;
  const std::byte* source;
  size_t bytes;
};

class NcclLaunch {
 public:
  // `rows`: of an allgather or alltoall.
  NcclLaunch(Operation& operation, const std::optional<RowTable>& rows, NcclCommunicator& communicator, Device& device,
             int own, int ranks);

  // In this order on the device's stream, the last when NCCL has launched what the second has asked for.
  void pack();
  void call();
  void unpack();

 private:
  // Of members that travel as they are or as one vector.
  struct Piece {
    const std::byte* source;
    std::byte* target;
    DType dtype;
    size_t count;
  };
  struct Identity {
    std::byte* target;
    DType dtype;
    size_t count;
  };

  void plan();
  void plan_allreduce();
  void plan_vector(DType dtype, const std::vector<Concatenation::Tensor>& tensors);
  void plan_reducescatter();
  void plan_elements();
  void plan_broadcast();
  std::byte* reserve(size_t bytes);
  abi::NcclOp op_for(DType dtype);
  void call_reducescatter(const Piece& piece, const Member& member, abi::NcclOp op);
  void call_by_elements(const Piece& piece, abi::NcclOp op);
  void call_allgather(size_t member);
  void call_alltoall(size_t member);
  void check(abi::NcclResult result) const { communicator_.check(result, "a collective was launched"); }

  Operation& operation_;
  const Request& request_;
  const std::optional<RowTable>& rows_;
  NcclCommunicator& communicator_;
  const abi::Nccl& nccl_;
  Device& device_;
  const int own_, ranks_;

  std::byte* scratch_ = nullptr;
  size_t reserved_ = 0;  // bytes of it
  std::vector<Piece> pieces_;
  std::vector<Identity> identities_;
  std::vector<DeviceCopy> before_, after_;
};

}  // namespace horovodish
