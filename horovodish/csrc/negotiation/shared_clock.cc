#include "negotiation/shared_clock.h"

namespace horovodish {

namespace {

using Steady = std::chrono::steady_clock;
constexpr int kReadings = 9;

// The time of day at the origin of the steady clock, from the least disturbed of several readings.
std::chrono::nanoseconds origin_of_day() {
  std::chrono::nanoseconds shortest = std::chrono::nanoseconds::max(), origin{};
  for (int reading = 0; reading < kReadings; ++reading) {
    const auto before = Steady::now();
    const auto day = std::chrono::system_clock::now();
    const auto took = Steady::now() - before;
    if (took >= shortest) continue;
    shortest = took;
    origin = day.time_since_epoch() - (before + took / 2).time_since_epoch();
  }
  return origin;
}

}  // namespace

double shared_seconds(Clock::time_point time) {
  static const std::chrono::nanoseconds origin = origin_of_day();
  return std::chrono::duration<double>(time.time_since_epoch() + origin).count();
}

}  // namespace horovodish
