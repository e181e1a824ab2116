// The cost on this machine of yielding to another thread, and of being woken.
#pragma once

#include <chrono>

namespace horovodish {

struct WaitingCosts {
  std::chrono::nanoseconds yield;  // a call of sched_yield() when no other thread wants the core
  std::chrono::nanoseconds wake;   // from a ring to the first instruction of the thread that slept
};

// The first call measures it, in about two milliseconds.
const WaitingCosts& waiting_costs();

}  // namespace horovodish
