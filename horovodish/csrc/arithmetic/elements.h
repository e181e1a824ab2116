// How the elements of each dtype are read for arithmetic, and written again.
#pragma once

#include <cstddef>
#include <type_traits>

#include "arithmetic/half.h"
#include "arithmetic/instructions.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace horovodish {

template <class T>
struct Element {  // integers
  using Accumulator = T;
  static HOROVODISH_INLINE T load(T value) { return value; }
  static HOROVODISH_INLINE T store(T value) { return value; }
};
template <>
struct Element<Float16> {
  using Accumulator = float;
  static HOROVODISH_INLINE float load(Float16 value) { return to_float(value); }
  static HOROVODISH_INLINE Float16 store(float value) { return to_float16(value); }
};
template <>
struct Element<BFloat16> {
  using Accumulator = float;
  static HOROVODISH_INLINE float load(BFloat16 value) { return to_float(value); }
  static HOROVODISH_INLINE BFloat16 store(float value) { return to_bfloat16(value); }
};

template <class T>
constexpr bool kIsFloating = std::is_floating_point_v<typename Element<T>::Accumulator>;

#if defined(__x86_64__)
// Processors with the instructions of x86-64-v3 convert eight float16 numbers at once. Compilers do not find that
// themselves.
constexpr size_t kConverted = 8;
__attribute__((target("avx,f16c"))) inline void widen(const Float16* from, float* to, size_t count) {
  size_t i = 0;
  for (; i + kConverted <= count; i += kConverted) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < count; ++i) to[i] = to_float(from[i]);
}
__attribute__((target("avx,f16c"))) inline void narrow(const float* from, Float16* to, size_t count) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  size_t i = 0;
  for (; i + kConverted <= count; i += kConverted) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), kNearest));
  }
  for (; i < count; ++i) to[i] = to_float16(from[i]);
}
inline bool converts_float16() { return instructions() >= Instructions::x86_64_v3; }
#else
constexpr bool converts_float16() { return false; }
inline void widen(const Float16*, float*, size_t) {}
inline void narrow(const float*, Float16*, size_t) {}
#endif

template <class T, class A>
HOROVODISH_INLINE void load_block(const T* from, A* to, size_t count) {
  if constexpr (std::is_same_v<T, Float16>) {
    if (converts_float16()) return widen(from, to, count);
  }
  for (size_t i = 0; i < count; ++i) to[i] = Element<T>::load(from[i]);
}
template <class T, class A>
HOROVODISH_INLINE void store_block(const A* from, T* to, size_t count) {
  if constexpr (std::is_same_v<T, Float16>) {
    if (converts_float16()) return narrow(from, to, count);
  }
  for (size_t i = 0; i < count; ++i) to[i] = Element<T>::store(from[i]);
}

}  // namespace horovodish
