// The floating-point mode of the calling thread.
#pragma once

#include <cstdint>

namespace horovodish {

// Within this scope, arithmetic follows IEEE 754: it rounds to nearest and keeps denormals. A framework's thread may
// flush denormals to zero, and it is chance which thread of a rank does the arithmetic.
class StandardFloats {
 public:
  StandardFloats() : before_(mode()) {
    if (before_ != kStandard) set(kStandard);
  }
  ~StandardFloats() {
    if (before_ != kStandard) set(before_);
  }
  StandardFloats(const StandardFloats&) = delete;
  StandardFloats& operator=(const StandardFloats&) = delete;

 private:
  // The assembly is declared to touch memory, since compilers move arithmetic across an instruction that only sets a
  // mode.
#if defined(__x86_64__)
  using Mode = uint32_t;
  static constexpr Mode kStandard = 0x1f80;  // all exceptions masked
  static constexpr Mode kFlags = 0x3f;       // which exceptions there have been
  static Mode mode() {
    Mode mode = 0;
    asm volatile("stmxcsr %0" : "=m"(mode) : : "memory");
    return mode & ~kFlags;
  }
  static void set(Mode mode) { asm volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
#elif defined(__aarch64__)
  using Mode = uint64_t;
  static constexpr Mode kStandard = 0;
  static Mode mode() {
    Mode mode = 0;
    asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
  }
  static void set(Mode mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
#error "which register holds the floating-point mode of this processor?"
#endif

  const Mode before_;
};

}  // namespace horovodish
