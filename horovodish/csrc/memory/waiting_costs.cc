#include "memory/waiting_costs.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "memory/futex.h"

namespace horovodish {

namespace {

using Steady = std::chrono::steady_clock;

// The least of these samples counts: in the others, a thread may have waited for a core, for example while other ranks
// start.
constexpr uint32_t kSamples = 21;
constexpr uint32_t kAnybody = 1;
constexpr std::chrono::microseconds kShortestWake{5}, kLongestWake{50};
constexpr std::chrono::microseconds kLongestYield{2};
constexpr std::chrono::microseconds kFallAsleep{40};
constexpr std::chrono::seconds kLongestSleep{1};  // if a ring does not come

// The caller of this thread stays on its core, so another core has to wake up.
void leave_core(int core) {
  cpu_set_t others;
  if (sched_getaffinity(0, sizeof others, &others) != 0) return;
  CPU_CLR(core, &others);
  sched_setaffinity(0, sizeof others, &others);  // fails if there is no other core
}

std::chrono::nanoseconds measure_wake() {
  std::chrono::nanoseconds least = kLongestWake;
  std::atomic<uint32_t> rung{0}, heard{0};
  Steady::time_point awake;  // of the thread, when `heard` has reached `rung`
  std::thread sleeper([&, core = sched_getcpu()] {
    leave_core(core);
    for (uint32_t ring = 1; ring <= kSamples; ++ring) {
      while (rung != ring) futex_wait(rung, ring - 1, kAnybody, kLongestSleep);
      awake = Steady::now();
      heard = ring;
    }
  });
  for (uint32_t ring = 1; ring <= kSamples; ++ring) {
    const auto asleep = Steady::now() + kFallAsleep;
    while (Steady::now() < asleep) pause_processor();
    const auto since = Steady::now();
    rung = ring;
    futex_wake(rung, kAnybody);
    while (heard != ring) std::this_thread::yield();
    least = std::min<std::chrono::nanoseconds>(least, awake - since);
  }
  sleeper.join();
  return std::max<std::chrono::nanoseconds>(least, kShortestWake);
}

std::chrono::nanoseconds measure_yield() {
  std::chrono::nanoseconds least = kLongestYield;
  for (uint32_t sample = 0; sample < kSamples; ++sample) {
    const auto since = Steady::now();
    std::this_thread::yield();
    least = std::min<std::chrono::nanoseconds>(least, Steady::now() - since);
  }
  return least;
}

}  // namespace

const WaitingCosts& waiting_costs() {
  static const WaitingCosts costs{measure_yield(), measure_wake()};
  return costs;
}

}  // namespace horovodish
