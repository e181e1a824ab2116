// A clock that ranks share: exactly on one host, and between hosts as well as their times of day agree.
#pragma once

#include "memory/clock.h"

namespace horovodish {

double shared_seconds(Clock::time_point time);

}  // namespace horovodish
