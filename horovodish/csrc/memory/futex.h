// Sleeping on a 32-bit word that may lie in memory shared between processes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace horovodish {

// Returns when woken through one of `bits`, at once if `word` is not `expected`, after `limit`, or without a reason.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, uint32_t bits, std::chrono::nanoseconds limit) {
  timespec deadline{};  // FUTEX_WAIT_BITSET takes an absolute time
  clock_gettime(CLOCK_MONOTONIC, &deadline);
  const int64_t nanoseconds = deadline.tv_nsec + limit.count();
  deadline.tv_sec += nanoseconds / 1'000'000'000;
  deadline.tv_nsec = nanoseconds % 1'000'000'000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_BITSET, expected, &deadline, nullptr, bits);
}

inline void futex_wake(std::atomic<uint32_t>& word, uint32_t bits) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, bits);
}

inline void pause_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace horovodish
