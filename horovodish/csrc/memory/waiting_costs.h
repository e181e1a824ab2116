// What it costs on this machine to let another thread run, and to be woken.
#pragma once

#include <chrono>

namespace horovodish {

struct WaitingCosts {
  std::chrono::nanoseconds yield;  // a call of sched_yield() when no other thread wants the core
  std::chrono::nanoseconds wake;   // from a ring to the first instruction of the thread that slept
};

// Measured by the first call, in about two milliseconds.
const WaitingCosts& waiting_costs();

}  // namespace horovodish
