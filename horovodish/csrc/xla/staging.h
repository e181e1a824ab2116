// Memory of ours for the tensors of a framework that may free or move its own while the engine works on it.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace horovodish {

// Keeps what was used before: the pages of fresh memory cost more than the copies into it.
class StagingPool {
 public:
  StagingPool() { free_.reserve(kMostFree); }

  static constexpr size_t kAlignment = 64;

  // Memory that comes back when nobody shares it any more. The pool outlives it.
  std::shared_ptr<std::byte> take(size_t bytes);

 private:
  // Blocks beyond this number are freed, so that programs that are not run any more do not keep theirs.
  static constexpr size_t kMostFree = 64;

  void give_back(std::span<std::byte> block) noexcept;

  std::mutex mutex_;
  std::vector<std::span<std::byte>> free_;  // guarded by mutex_
};

}  // namespace horovodish
