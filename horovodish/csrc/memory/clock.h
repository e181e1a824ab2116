// The clock of all waits and timeouts: the steady clock, or a test's replacement.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace horovodish {

struct Clock {
  using duration = std::chrono::steady_clock::duration;
  using time_point = std::chrono::steady_clock::time_point;

  // A test's clock.
  struct Source {
    time_point (*now)();
    void (*sleep)(std::chrono::nanoseconds);
  };

  static time_point now() {
    const Source* const source = source_.load(std::memory_order_relaxed);
    return source != nullptr ? source->now() : std::chrono::steady_clock::now();
  }
  static void sleep(std::chrono::nanoseconds time) {
    if (const Source* const source = source_.load(std::memory_order_relaxed)) return source->sleep(time);
    std::this_thread::sleep_for(time);
  }
  // `source` must outlive its use; null: the steady clock.
  static void replace(const Source* source) { source_ = source; }

 private:
  static inline std::atomic<const Source*> source_{nullptr};
};

}  // namespace horovodish
