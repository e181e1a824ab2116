// Which vector instructions this processor and its kernel let a process use, as the levels of the x86-64 ABI.
#pragma once

namespace horovodish {

enum class Instructions { baseline, x86_64_v3, x86_64_v4 };

Instructions instructions();
// For tests: from now on no others are used, though the processor may have more.
void limit_instructions(Instructions most);

}  // namespace horovodish

// What a function below calls and shall be compiled for its level.
#define HOROVODISH_INLINE inline __attribute__((always_inline))

// Defines the function NAME, whose BODY is compiled for each level and called for the processor's own: one wheel serves
// every x86-64. The levels are lists of instructions and no arch=, because zig's command line turns off all that the
// baseline has not, and only a list turns them on again. The compilers' own dispatch, target_clones, finds no level with zig.
#if defined(__x86_64__)
#define HOROVODISH_V3 "avx2,bmi,bmi2,f16c,fma,lzcnt,movbe"
#define HOROVODISH_V4 HOROVODISH_V3 ",avx512f,avx512bw,avx512cd,avx512dq,avx512vl"
#define HOROVODISH_VARIANTS(RESULT, NAME, PARAMETERS, ARGUMENTS, BODY)         \
  __attribute__((target(HOROVODISH_V4))) RESULT NAME##_v4 PARAMETERS { BODY; } \
  __attribute__((target(HOROVODISH_V3))) RESULT NAME##_v3 PARAMETERS { BODY; } \
  RESULT NAME##_baseline PARAMETERS { BODY; }                                  \
  RESULT NAME PARAMETERS {                                                     \
    if (instructions() == Instructions::x86_64_v4) return NAME##_v4 ARGUMENTS; \
    if (instructions() == Instructions::x86_64_v3) return NAME##_v3 ARGUMENTS; \
    return NAME##_baseline ARGUMENTS;                                          \
  }
#else
#define HOROVODISH_VARIANTS(RESULT, NAME, PARAMETERS, ARGUMENTS, BODY) \
  RESULT NAME PARAMETERS { BODY; }
#endif
