#include "xla/staging.h"

#include <algorithm>
#include <new>

namespace horovodish {

namespace {
// The pool gives a larger block than asked for if at most half of the block stays unused.
constexpr size_t kLargestExcess = 2;
}  // namespace

std::shared_ptr<std::byte> StagingPool::take(size_t bytes) {
  const size_t least = std::max(bytes, kAlignment);
  std::span<std::byte> taken;
  {
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      if (block->size() < least || block->size() > least * kLargestExcess) continue;
      if (best == free_.end() || block->size() < best->size()) best = block;
    }
    if (best != free_.end()) {
      taken = *best;
      free_.erase(best);
    }
  }
  if (taken.empty()) taken = {static_cast<std::byte*>(::operator new(least, std::align_val_t{kAlignment})), least};
  return {taken.data(), [this, taken](std::byte*) { give_back(taken); }};
}

void StagingPool::give_back(std::span<std::byte> block) noexcept {
  std::lock_guard lock(mutex_);
  if (free_.size() == kMostFree) {
    ::operator delete(free_.front().data(), std::align_val_t{kAlignment});
    free_.erase(free_.begin());
  }
  free_.push_back(block);
}

}  // namespace horovodish
