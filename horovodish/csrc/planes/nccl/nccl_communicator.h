// A communicator of NCCL's that never blocks: what is asked of it may still be in progress when the call returns, and
// nothing else may be asked until ready().
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "abi/nccl.h"
#include "arithmetic/types.h"
#include "gpu/device.h"

namespace horovodish {

class NcclCommunicator {
 public:
  // Begins to connect; every rank must do so. Within a Device::Scope, as everything here.
  NcclCommunicator(const abi::Nccl& nccl, Device& device, const abi::NcclUniqueId& id, int ranks, int rank);
  ~NcclCommunicator() { end(std::chrono::milliseconds(0)); }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Whether what was asked is done. Throws std::runtime_error when the communicator has failed, now or in the background.
  bool ready();
  // Sends out what others may still need of this rank, for a time. Best effort.
  void finalize(std::chrono::milliseconds limit) noexcept;
  // Its end. It is aborted unless it was finalized: kernels that wait for peers end, and nothing more is launched once
  // this is true. That takes a while where NCCL gives memory back, which waits for all that the GPU was given; a kernel of
  // another communicator that waits for the same lost peer may be among it, so this goes on by itself after the limit.
  bool end(std::chrono::milliseconds limit);

  // Throws std::runtime_error with NCCL's text unless the call has succeeded or is in progress.
  void check(abi::NcclResult result, const char* what) const;
  // A sum of contributions that are multiplied by `factor` before, until forget_factors().
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

// NCCL's number of a dtype that it reduces.
abi::NcclType nccl_type(DType dtype);

}  // namespace horovodish
