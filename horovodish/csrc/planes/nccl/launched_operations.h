// What this rank has launched on its GPU, in all process sets. An operation counts as complete when it is launched, so this is
// where the engine learns whether it also came to its end.
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

#include "operation/handle.h"

namespace horovodish {

class LaunchedOperations {
 public:
  // One more was launched. Returns its number.
  uint64_t begin() {
    const uint64_t number = last_ + 1;
    under_way_.insert(number);
    oldest_ = *under_way_.begin();
    last_ = number;  // after `oldest_`: who sees this number also sees that it is under way
    return number;
  }
  // Its event has come, and nothing is known against its result.
  void end(uint64_t number) noexcept {
    under_way_.erase(number);
    oldest_ = under_way_.empty() ? kNone : *under_way_.begin();
  }
  // It will not come to its end. The first of these is kept.
  void lose(uint64_t number, const Error& why) noexcept {
    keep(why);
    if (first_lost_ == 0 || number < first_lost_) first_lost_ = number;  // before the operation counts as ended
    end(number);
  }

  // The number of the one that was launched last.
  uint64_t last() const { return last_; }
  // Whether none up to this number is under way.
  bool ended(uint64_t number) const { return oldest_ > number; }
  bool any_lost() const { return first_lost_ != 0; }
  // The least number of one that never came to its end; 0 if there is none.
  uint64_t first_lost() const { return first_lost_; }
  // Why the first one that was lost never came to its end.
  std::optional<Error> loss() const {
    const std::lock_guard lock(mutex_);
    return loss_;
  }

 private:
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

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
  std::atomic<uint64_t> last_{0}, oldest_{kNone};
  std::atomic<uint64_t> first_lost_{0};
  mutable std::mutex mutex_;
  std::optional<Error> loss_;  // guarded by mutex_
};

}  // namespace horovodish
