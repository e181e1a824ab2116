// One operation as NCCL calls: the packing, the calls, and the copies afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "operation/operation.h"
#include "planes/fusion.h"
#include "planes/nccl/nccl_communicator.h"

namespace horovodish {

// Why NCCL cannot carry out a request; empty if it can. The same on all ranks whose requests are the same.
std::string problem_for_nccl(Kind kind, ReduceOp op, const std::vector<DType>& dtypes, double prescale,
                             double postscale, CodecKind codec);
std::string problem_for_nccl(const Request& request);

class NcclLaunch {
 public:
  // Of an allgather or alltoall: what each rank sends, as Buffer::rows of its members, one after the other.
  using Rows = std::vector<std::vector<int64_t>>;

  NcclLaunch(Operation& operation, const Rows& rows, NcclCommunicator& communicator, Device& device, int own,
             int ranks);

  // Call these in this order on the device's stream; the last one after NCCL has launched the calls of the second.
  void pack();
  void call();
  void unpack();

 private:
  // A unit of transfer: a member as it is, or several members as one vector. Or a unit of copying; without a source, it
  // is filled with the identity.
  struct Piece {
    const std::byte* source;
    std::byte* target;
    DType dtype;
    size_t count;
  };

  void plan();
  void plan_allreduce();
  void plan_vector(const Concatenation& whole);
  void plan_in_buffer(const Concatenation& whole, Range comes, Range goes);
  void plan_reducescatter();
  void plan_elements();
  void plan_broadcast();
  std::byte* reserve(size_t bytes);
  void copy(const std::vector<Piece>& pieces) const;
  // Number of rows of a member that one rank sends to another.
  int64_t rows(size_t member, size_t from, size_t to) const;
  abi::NcclOp op_for(DType dtype);
  // `ops`: of the pieces, if they are reduced.
  void call_all(const std::vector<abi::NcclOp>& ops);
  void call_reducescatter(const Piece& piece, const Member& member, abi::NcclOp op);
  void call_by_elements(const Piece& piece, abi::NcclOp op);
  void call_allgather(size_t member);
  void call_alltoall(size_t member);
  template <class SizeOf>
  bool all_equal(SizeOf size_of_rank) const;
  template <class PartOf>
  void reduce_parts(const Piece& piece, std::byte* own, abi::NcclOp op, PartOf part_of);
  template <class BytesOf>
  void gather_parts(const std::byte* own, std::byte* target, BytesOf bytes_of_rank);
  void check(abi::NcclResult result) const { communicator_.check(result, "a collective was launched"); }
  template <class Function, class... Arguments>
  void ask(Function function, Arguments... arguments) const {
    check(function(arguments..., communicator_.get(), device_.stream()));
  }

  Operation& operation_;
  const Request& request_;
  const Rows& rows_;
  NcclCommunicator& communicator_;
  const abi::Nccl& nccl_;
  Device& device_;
  const int own_, ranks_;

  std::byte* scratch_ = nullptr;
  size_t reserved_ = 0;  // bytes of it
  std::vector<Piece> pieces_, before_, after_;
};

}  // namespace horovodish
