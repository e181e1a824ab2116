#include "arithmetic/instructions.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace horovodish {

namespace {
std::atomic<Instructions> allowed{Instructions::x86_64_v4};
}

void limit_instructions(Instructions most) { allowed = most; }

#if defined(__x86_64__)

namespace {

// The registers that the kernel saves for a process: XCR0 of the processor's manual.
uint32_t saved_registers() {
  uint32_t low = 0;
  uint32_t high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool has_all(uint32_t bits, uint32_t wanted) { return (bits & wanted) == wanted; }

Instructions detected() {
  constexpr uint32_t kSse3ToAvx = bit_FMA | bit_MOVBE | bit_OSXSAVE | bit_AVX | bit_F16C;
  constexpr uint32_t kAvx2 = bit_AVX2 | bit_BMI | bit_BMI2;
  constexpr uint32_t kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
  constexpr uint32_t kYmm = 0x6;
  constexpr uint32_t kZmm = 0xe6;
  uint32_t a = 0;
  uint32_t b = 0;
  uint32_t c = 0;
  uint32_t d = 0;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d) == 0 || !has_all(c, bit_LZCNT)) return Instructions::baseline;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || !has_all(c, kSse3ToAvx)) return Instructions::baseline;
  if (!has_all(saved_registers(), kYmm)) return Instructions::baseline;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || !has_all(b, kAvx2)) return Instructions::baseline;
  const bool v4 = has_all(b, kAvx512) && has_all(saved_registers(), kZmm);
  return v4 ? Instructions::x86_64_v4 : Instructions::x86_64_v3;
}

}  // namespace

Instructions instructions() {
  static const Instructions level = detected();
  return std::min(level, allowed.load(std::memory_order_relaxed));
}

#else

Instructions instructions() { return Instructions::baseline; }

#endif

}  // namespace horovodish
