// The vector instructions that this processor and its kernel let a process use, as levels of the x86-64 ABI.
#pragma once

namespace horovodish {

enum class Instructions { baseline, x86_64_v3, x86_64_v4 };

Instructions instructions();
// For tests: from now on no higher level is used, even if the processor has it.
void limit_instructions(Instructions most);

}  // namespace horovodish

// For a function that a function below calls, and that is compiled for the caller's level.
#define HOROVODISH_INLINE inline __attribute__((always_inline))

// Defines the function NAME. BODY is compiled for each level, and a call runs the version for the processor, so one
// wheel serves every x86-64. The levels are lists of instructions and no arch=: zig's command line turns off all
// instructions beyond the baseline, and only a list turns them on again. The compilers' own dispatch, target_clones,
// finds no level with zig.
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
