// A clock that ranks share: exactly on one host, and between hosts as well as their times of day agree.
#pragma once

#include <chrono>

namespace horovodish {

double shared_seconds(std::chrono::steady_clock::time_point time);

}  // namespace horovodish
