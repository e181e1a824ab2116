// A queue of fixed size between two threads: one pushes, the other takes, and neither waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace horovodish {

template <class T>
class SingleProducerRing {
 public:
  // `capacity`: a power of two.
  explicit SingleProducerRing(size_t capacity) : slots_(std::make_unique<T[]>(capacity)), mask_(capacity - 1) {}

  // Called on the pushing side, which may be several threads if something else serializes them.
  bool full() {
    const uint64_t number = pushed_.load(std::memory_order_relaxed);
    if (number - known_taken_ <= mask_) return false;
    known_taken_ = taken_.load(std::memory_order_acquire);
    return number - known_taken_ > mask_;
  }

  // Returns false if the ring is full.
  bool push(T&& value) {
    if (full()) return false;
    const uint64_t number = pushed_.load(std::memory_order_relaxed);
    slots_[number & mask_] = std::move(value);
    pushed_.store(number + 1, std::memory_order_release);
    return true;
  }

  // The oldest value; none if the ring is empty.
  std::optional<T> take() {
    const uint64_t number = taken_.load(std::memory_order_relaxed);
    if (number == pushed_.load(std::memory_order_acquire)) return std::nullopt;
    std::optional<T> value(std::move(slots_[number & mask_]));
    taken_.store(number + 1, std::memory_order_release);
    return value;
  }

 private:
  static constexpr size_t kCacheLine = 64;

  const std::unique_ptr<T[]> slots_;
  const uint64_t mask_;
  alignas(kCacheLine) std::atomic<uint64_t> pushed_{0};
  uint64_t known_taken_ = 0;  // of the thread that pushes: the last value of taken_ that it saw
  alignas(kCacheLine) std::atomic<uint64_t> taken_{0};
};

}  // namespace horovodish
