// The engine's own memory for tensors of a framework that may free or move its memory while the engine works.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace horovodish {

// Keeps used blocks: the pages of fresh memory cost more than the copies into it.
class StagingPool {
 public:
  StagingPool() { free_.reserve(kMostFree); }

  static constexpr size_t kAlignment = 64;

  // Memory that returns to the pool when nobody shares it any more. The pool outlives it.
  std::shared_ptr<std::byte> take(size_t bytes);

 private:
  // Blocks beyond this number are freed, so that programs which no longer run do not keep memory.
  static constexpr size_t kMostFree = 64;

  void give_back(std::span<std::byte> block) noexcept;

  std::mutex mutex_;
  std::vector<std::span<std::byte>> free_;  // guarded by mutex_
};

}  // namespace horovodish
