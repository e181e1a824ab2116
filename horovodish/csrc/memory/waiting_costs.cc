#include "memory/waiting_costs.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "memory/futex.h"

namespace horovodish {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kSamples = 21;
constexpr uint32_t kAnybody = 1;
// A busy machine makes threads wait for a core, which says nothing about waking up.
constexpr std::chrono::microseconds kShortestWake{5}, kLongestWake{50};
constexpr std::chrono::nanoseconds kLongestYield{5000};
constexpr std::chrono::microseconds kFallAsleep{40};

std::chrono::nanoseconds median(std::array<std::chrono::nanoseconds, kSamples>& samples) {
  const auto middle = samples.begin() + kSamples / 2;
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

// The caller of this thread goes on on its own core, so another one has to wake up.
void leave_core(int core) {
  cpu_set_t others;
  if (sched_getaffinity(0, sizeof others, &others) != 0) return;
  CPU_CLR(core, &others);
  sched_setaffinity(0, sizeof others, &others);  // fails where there is no other
}

std::chrono::nanoseconds measure_wake() {
  std::array<std::chrono::nanoseconds, kSamples> samples{};
  std::atomic<uint32_t> rung{0}, heard{0};
  Clock::time_point awake;  // of the thread, when `heard` has followed `rung`
  std::thread sleeper([&, core = sched_getcpu()] {
    leave_core(core);
    for (uint32_t ring = 1; ring <= kSamples; ++ring) {
      while (rung != ring) futex_wait(rung, ring - 1, kAnybody, std::nullopt);
      awake = Clock::now();
      heard = ring;
    }
  });
  for (uint32_t ring = 1; ring <= kSamples; ++ring) {
    const auto asleep = Clock::now() + kFallAsleep;
    while (Clock::now() < asleep) pause_processor();
    const auto since = Clock::now();
    rung = ring;
    futex_wake(rung, kAnybody);
    while (heard != ring) std::this_thread::yield();
    samples[ring - 1] = awake - since;
  }
  sleeper.join();
  return std::clamp<std::chrono::nanoseconds>(median(samples), kShortestWake, kLongestWake);
}

std::chrono::nanoseconds measure_yield() {
  std::array<std::chrono::nanoseconds, kSamples> samples{};
  for (auto& sample : samples) {
    const auto since = Clock::now();
    std::this_thread::yield();
    sample = Clock::now() - since;
  }
  return std::min<std::chrono::nanoseconds>(median(samples), kLongestYield);
}

}  // namespace

const WaitingCosts& waiting_costs() {
  static const WaitingCosts costs{measure_yield(), measure_wake()};
  return costs;
}

}  // namespace horovodish
