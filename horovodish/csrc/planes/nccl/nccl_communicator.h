// An NCCL communicator that never blocks: a call may still be in progress after it has returned, and nothing else may
// be asked until ready().
#pragma once

#include <chrono>
#include <vector>

#include "abi/nccl.h"
#include "arithmetic/types.h"
#include "gpu/device.h"

namespace horovodish {

class NcclCommunicator {
 public:
  // Begins to connect; every rank must do so. Call all functions here within a Device::Scope.
  NcclCommunicator(const abi::Nccl& nccl, Device& device, const abi::NcclUniqueId& id, int ranks, int rank);
  ~NcclCommunicator() { end(std::chrono::milliseconds(0)); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Returns whether the last call is done. Throws std::runtime_error if the communicator has failed, now or in the
  // background.
  bool ready();
  // Sends the data that others may still need of this rank, within a time limit. Best effort.
  void finalize(std::chrono::milliseconds limit) noexcept;
  // Ends the communicator. It is aborted unless it was finalized: kernels that wait for peers end, and nothing more is
  // launched once this returns true. The end takes a while if NCCL frees memory, because that waits for all work of the
  // GPU. A kernel of another communicator that waits for the same lost peer may be part of that work, so the end goes
  // on by itself after the limit.
  bool end(std::chrono::milliseconds limit);

  // Throws std::runtime_error with NCCL's text unless the call has succeeded or is in progress.
  void check(abi::NcclResult result, const char* what) const;
  // The operator of a sum whose contributions are first multiplied by `factor`. Valid until forget_factors().
  abi::NcclOp sum_of_multiples(DType dtype, double factor);
  void forget_factors();

  const abi::Nccl& nccl() const { return nccl_; }
  abi::NcclCommunicator get() const { return communicator_; }

 private:
  const abi::Nccl& nccl_;
  Device& device_;
  abi::NcclCommunicator communicator_ = nullptr;
  bool connected_ = false, finalized_ = false;
  std::vector<abi::NcclOp> factors_;
};

// NCCL's number of a dtype that NCCL reduces.
abi::NcclType nccl_type(DType dtype);

}  // namespace horovodish
