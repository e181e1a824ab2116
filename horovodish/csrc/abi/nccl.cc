#include "abi/nccl.h"

#include <stdexcept>

namespace horovodish::abi {

int Nccl::checked_version() const {
  int found = 0;
  if (get_version(&found) != NcclResult::success) throw std::runtime_error("ncclGetVersion failed");
  if (found < kOldest) throw std::runtime_error("this NCCL is too old: " + std::to_string(found));
  return found;
}

}  // namespace horovodish::abi
