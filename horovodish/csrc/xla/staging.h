// Memory of ours for the tensors of a framework that may free or move its own while the engine works on it.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace horovodish {

// Keeps what was used before: the pages of fresh memory cost more than the copies into it.
class StagingPool {
 public:
  static constexpr size_t kAlignment = 64;

  class Block {
   public:
    Block() = default;
    std::byte* data() const { return memory_.get(); }
    size_t bytes() const { return bytes_; }
    // Something may write into it for ever: it is neither freed nor used again.
    void abandon() { (void)memory_.release(); }

   private:
    friend class StagingPool;
    struct Free {
      void operator()(std::byte* memory) const;
    };
    std::unique_ptr<std::byte, Free> memory_;
    size_t bytes_ = 0;
  };

  Block take(size_t bytes);
  void give_back(Block block);

 private:
  std::mutex mutex_;
  std::vector<Block> free_;  // guarded by mutex_
};

}  // namespace horovodish
