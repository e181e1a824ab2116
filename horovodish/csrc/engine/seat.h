// The seat is the progress lock: the thread that holds it drives the engine. The engine's own thread drives in the
// background; a caller that has to wait anyway takes over and drives itself, which saves two thread switches per operation
// and leaves the core to the one thread that has something to do.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "memory/clock.h"

namespace horovodish {

class Seat {
 public:
  // Waits until the seat is free or `enough()` is true. Returns true if the caller now drives. The engine's thread
  // gives way.
  template <class Enough>
  bool take_as_caller(Clock::time_point deadline, Enough enough) {
    std::unique_lock lock(mutex_);
    callers_.fetch_add(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // see announce_change()
    const bool woken = changed_.wait_until(lock, deadline, [&] { return !taken_ || enough(); });
    callers_.fetch_sub(1, std::memory_order_relaxed);
    if (!woken || taken_) return false;
    taken_ = true;
    return true;
  }
  bool take_if_free() {
    std::lock_guard lock(mutex_);
    return !std::exchange(taken_, true);
  }
  void take_as_engine() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !taken_ && callers_.load(std::memory_order_relaxed) == 0; });
    taken_ = true;
  }
  bool callers_waiting() const { return callers_.load(std::memory_order_relaxed) > 0; }
  // The seat is a lock of the standard library, too: its holder drives.
  void lock() {
    take_as_caller(Clock::time_point::max(), [] { return false; });
  }
  void unlock() {
    {
      std::lock_guard lock(mutex_);
      taken_ = false;
    }
    changed_.notify_all();
  }
  // Call it after a change that may make `enough()` of a waiting caller true. The caller counts itself and then asks;
  // this thread makes the change and then looks at the count. The fences between the two steps, as in doorbell.h, make
  // at least one of the two see the other. Without them both may read the old value, and the caller sleeps until its
  // deadline.
  void announce_change() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!callers_waiting()) return;
    {
      std::lock_guard lock(mutex_);
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> callers_{0};  // waiting, not driving
  bool taken_ = false;  // guarded by mutex_
};

}  // namespace horovodish
