#include "xla/staging.h"

#include <algorithm>
#include <new>
#include <utility>

namespace horovodish {

namespace {
// A larger block than asked for is taken as long as no more than half of it stays unused.
constexpr size_t kLargestExcess = 2;
// Blocks beyond this number are freed, so that programs that are not run any more do not keep theirs.
constexpr size_t kMostFree = 64;
}  // namespace

void StagingPool::Block::Free::operator()(std::byte* memory) const {
  ::operator delete(memory, std::align_val_t{kAlignment});
}

StagingPool::Block StagingPool::take(size_t bytes) {
  bytes = std::max(bytes, kAlignment);
  {
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      if (block->bytes() < bytes || block->bytes() > bytes * kLargestExcess) continue;
      if (best == free_.end() || block->bytes() < best->bytes()) best = block;
    }
    if (best != free_.end()) {
      Block block = std::move(*best);
      free_.erase(best);
      return block;
    }
  }
  Block block;
  block.memory_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kAlignment})));
  block.bytes_ = bytes;
  return block;
}

void StagingPool::give_back(Block block) {
  if (block.data() == nullptr) return;
  std::lock_guard lock(mutex_);
  if (free_.size() == kMostFree) free_.erase(free_.begin());
  free_.push_back(std::move(block));
}

}  // namespace horovodish
