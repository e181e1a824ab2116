// The operations that this rank has launched on its GPU, in all process sets. An operation counts as complete when it
// is launched, so this is where the engine learns whether the GPU has completed it.
//
// Only the thread that holds the seat reports. Any thread may ask.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <set>

#include "memory/clock.h"
#include "operation/handle.h"

namespace horovodish {

class LaunchedOperations {
 public:
  // One more operation was launched. Returns its number.
  uint64_t begin() {
    const uint64_t number = last_ + 1;
    under_way_.insert(number);
    find_oldest();
    last_ = number;  // after `oldest_`: a thread that sees this number sees that it is under way
    return number;
  }
  // The operation's event has come, and no error of it is known.
  void end(uint64_t number) noexcept {
    under_way_.erase(number);
    find_oldest();
  }
  // The operation will not complete. The first of these is kept.
  void lose(uint64_t number, const Error& why) noexcept {
    keep(why);
    if (first_lost_ == 0 || number < first_lost_) first_lost_ = number;  // before the operation counts as ended
    end(number);
  }

  // The number of the last launched operation.
  uint64_t last() const { return last_; }
  // Returns whether no operation up to this number is under way.
  bool ended(uint64_t number) const { return oldest_ > number; }
  // The GPU carries out operations in their order. Returns whether this one is the next to end. Only for the thread that
  // holds the seat.
  bool is_next(uint64_t number) const { return oldest_ == number; }
  // How long the operation that is the next to end has been so. Only for the thread that holds the seat.
  Clock::duration without_end(Clock::time_point now) const { return now - next_since_; }
  bool any_lost() const { return first_lost_ != 0; }
  // The least number of an operation that never completed; 0 if there is none.
  uint64_t first_lost() const { return first_lost_; }
  // Why the first lost operation never completed.
  std::optional<Error> loss() const {
    const std::lock_guard lock(mutex_);
    return loss_;
  }

 private:
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

  void find_oldest() noexcept {
    const uint64_t oldest = under_way_.empty() ? kNone : *under_way_.begin();
    if (oldest_.exchange(oldest) != oldest) next_since_ = Clock::now();
  }
  void keep(const Error& why) noexcept {
    const std::lock_guard lock(mutex_);
    if (loss_) return;
    try {
      loss_ = why;
    } catch (const std::bad_alloc&) {
      loss_ = {why.kind, kOutOfMemory};
    }
  }

  std::set<uint64_t> under_way_;  // only used by the thread that holds the seat
  Clock::time_point next_since_{};  // likewise: when oldest_ changed
  std::atomic<uint64_t> last_{0}, oldest_{kNone};
  std::atomic<uint64_t> first_lost_{0};
  mutable std::mutex mutex_;
  std::optional<Error> loss_;  // guarded by mutex_
};

}  // namespace horovodish
