// One word per rank. Every thread with news for the rank's engine rings it: own submissions, peers' messages and chunk
// counters, the watch for lost peers, shutdown. Ringing costs a system call only if the rank sleeps and wants to know.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "memory/futex.h"

namespace horovodish {

class Doorbell {
 public:
  // The kind of sleeper. The values are also the futex bits that wake just that thread.
  enum Sleeper : uint32_t {
    nobody = 0,
    engine = 1,  // the engine thread
    caller = 2,  // a thread in synchronize(), which drives the engine while it waits
    indifferent =
        4,  // the engine thread, with nothing under way: news of peers can wait until this rank has work itself
  };

  // For peers, after they have written the news.
  void ring() { wake_if(engine | caller); }
  // For this rank's own threads: also wakes an indifferent sleeper.
  void ring_own() { wake_if(engine | caller | indifferent); }
  // For a thread that is about to drive, or to wait for the driving thread.
  void ring_caller() { wake_if(caller); }

  // To sleep without missing a ring: take the value, announce, look once more for news, and only then sleep.
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void announce(Sleeper who) {
    sleeper_.store(who, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  // `who`: engine or caller.
  void sleep(uint32_t value, Sleeper who, std::chrono::nanoseconds limit) { futex_wait(value_, value, who, limit); }
  void wake_engine() { wake(engine); }

 private:
  void wake_if(uint32_t sleepers) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint32_t who = sleeper_.load(std::memory_order_relaxed);
    if ((who & sleepers) != 0) wake(who == indifferent ? engine : who);
  }
  void wake(uint32_t who) {
    value_.fetch_add(1, std::memory_order_release);
    futex_wake(value_, who);
  }

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleeper_{nobody};
};

}  // namespace horovodish
