// A clock that ranks share. On one host it is exact. Between hosts it is as good as the agreement of their times of
// day.
#pragma once

#include "memory/clock.h"

namespace horovodish {

double shared_seconds(Clock::time_point time);

}  // namespace horovodish
