#include "arithmetic/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "arithmetic/elements.h"
#include "arithmetic/instructions.h"
#include "arithmetic/standard_floats.h"

// For a loop whose target may be one of its sources, although no element depends on another.
#if defined(__clang__)
#define HOROVODISH_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define HOROVODISH_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace horovodish {

namespace {

// Elements reduced at a time: the accumulators of a block stay in the L1 cache.
constexpr size_t kBlock = 512;

template <class A>
HOROVODISH_INLINE A scaled(A value, double factor, int divisor = 1) {
  if constexpr (std::is_floating_point_v<A>) {
    return value * static_cast<A>(factor);
  } else {
    // The conversion of NaN or an out-of-range double is undefined. 2^63 is the first double above the int64 range.
    const double product = static_cast<double>(value) * factor / divisor;
    if (product != product) return 0;
    if (product >= static_cast<double>(std::numeric_limits<A>::max())) return std::numeric_limits<A>::max();
    if (product <= static_cast<double>(std::numeric_limits<A>::min())) return std::numeric_limits<A>::min();
    return static_cast<A>(product);
  }
}

constexpr auto kAdd = []<class A>(A a, A b) __attribute__((always_inline)) {
  if constexpr (std::is_integral_v<A>) return static_cast<A>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  if constexpr (std::is_floating_point_v<A>) return a + b;
};
constexpr auto kMultiply = []<class A>(A a, A b) __attribute__((always_inline)) {
  if constexpr (std::is_integral_v<A>) return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  if constexpr (std::is_floating_point_v<A>) return a * b;
};
constexpr auto kMinimum = []<class A>(A a, A b) __attribute__((always_inline)) { return a < b || a != a ? a : b; };
constexpr auto kMaximum = []<class A>(A a, A b) __attribute__((always_inline)) { return a > b || a != a ? a : b; };

template <class Function>
HOROVODISH_INLINE void with_operator(ReduceOp op, Function function) {
  switch (op) {
    case ReduceOp::average:
    case ReduceOp::sum:
      return function(kAdd);
    case ReduceOp::min:
      return function(kMinimum);
    case ReduceOp::max:
      return function(kMaximum);
    case ReduceOp::product:
      return function(kMultiply);
    case ReduceOp::adasum:
      throw std::logic_error("Adasum is no element-wise reduction");
  }
}

// Floating-point numbers are multiplied by `factor`, which is exact if it is 1. Integers do not change.
template <class T, class A>
HOROVODISH_INLINE T finished(A value, double factor) {
  if constexpr (std::is_floating_point_v<A>) value *= static_cast<A>(factor);
  return Element<T>::store(value);
}

HOROVODISH_INLINE uint32_t word_at(const BFloat16* numbers) {
  uint32_t word;
  std::memcpy(&word, numbers, sizeof word);
  return word;
}

// bfloat16 numbers by pairs, as the two halves of a word. To make a half a float, the other half is cleared or shifted
// out. So no number changes its place in a vector register, which would take longer than the arithmetic. `count` is
// even.
template <bool kScaled, class Op>
HOROVODISH_INLINE void reduce_pairs(BFloat16* target, const BFloat16* left, const BFloat16* right, size_t count,
                                    float factor, Op op) {
  constexpr uint32_t kUpper = 0xffff0000;
  HOROVODISH_INDEPENDENT
  for (size_t i = 0; i < count; i += 2) {
    const uint32_t a = word_at(left + i), b = word_at(right + i);
    float lower = op(std::bit_cast<float>(a << 16), std::bit_cast<float>(b << 16));
    float upper = op(std::bit_cast<float>(a & kUpper), std::bit_cast<float>(b & kUpper));
    if constexpr (kScaled) {
      lower *= factor;
      upper *= factor;
    }
    const uint32_t pair = rounded_bits(lower) >> 16 | (rounded_bits(upper) & kUpper);
    std::memcpy(target + i, &pair, sizeof pair);
  }
}

// If nothing is scaled before the reduction, and only floating-point numbers after it: each element is read and written
// once, apart from the accumulator for more than two sources.
template <class T, class Op>
HOROVODISH_INLINE void reduce_unscaled(T* target, const T* const* sources, size_t sources_count, size_t count,
                                       double factor, Op op) {
  using E = Element<T>;
  using A = typename E::Accumulator;
  const T* const first = sources[0];
  const T* const last = sources[sources_count - 1];
  if (sources_count == 2) {
    size_t done = 0;
    if constexpr (std::is_same_v<T, BFloat16>) {
      done = count / 2 * 2;
      if (factor == 1.0) {
        reduce_pairs<false>(target, first, last, done, 1, op);
      } else {
        reduce_pairs<true>(target, first, last, done, static_cast<float>(factor), op);
      }
    }
    HOROVODISH_INDEPENDENT
    for (size_t i = done; i < count; ++i) target[i] = finished<T>(op(E::load(first[i]), E::load(last[i])), factor);
    return;
  }
  A accumulator[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    const T* source = sources[1] + begin;
    for (size_t i = 0; i < length; ++i) accumulator[i] = op(E::load(first[begin + i]), E::load(source[i]));
    for (size_t s = 2; s + 1 < sources_count; ++s) {
      source = sources[s] + begin;
      for (size_t i = 0; i < length; ++i) accumulator[i] = op(accumulator[i], E::load(source[i]));
    }
    HOROVODISH_INDEPENDENT
    for (size_t i = 0; i < length; ++i) {
      target[begin + i] = finished<T>(op(accumulator[i], E::load(last[begin + i])), factor);
    }
  }
}

// Everything else, and float16 if the processor converts it, in passes over blocks. The operator is chosen for each
// block: compiling all passes for each operator would take several times as long.
template <class T>
HOROVODISH_INLINE void reduce_scaled(ReduceOp op, T* target, const T* const* sources, size_t sources_count,
                                     size_t count, double prescale, double factor, int divisor) {
  using E = Element<T>;
  using A = typename E::Accumulator;
  A accumulator[kBlock];
  A block[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    for (size_t s = 0; s < sources_count; ++s) {
      const T* source = sources[s] + begin;
      A* const loaded = s == 0 ? accumulator : block;
      load_block(source, loaded, length);
      if (prescale != 1.0) {
        for (size_t i = 0; i < length; ++i) loaded[i] = scaled(loaded[i], prescale);
      }
      if (s == 0) continue;
      with_operator(op, [&](auto combine) __attribute__((always_inline)) {
        for (size_t i = 0; i < length; ++i) accumulator[i] = combine(accumulator[i], block[i]);
      });
    }
    if (factor != 1.0) {
      for (size_t i = 0; i < length; ++i) accumulator[i] = scaled(accumulator[i], factor, divisor);
    } else if constexpr (std::is_integral_v<A>) {
      if (divisor != 1) {
        for (size_t i = 0; i < length; ++i) accumulator[i] = static_cast<A>(accumulator[i] / divisor);
      }
    }
    store_block(accumulator, target + begin, length);
  }
}

template <class T>
HOROVODISH_INLINE void reduce_typed(std::type_identity<T>, ReduceOp op, void* to, const void* const* from,
                                    size_t sources_count, size_t count, const Scaling& scaling) {
  using E = Element<T>;
  constexpr bool is_floating = kIsFloating<T>;
  auto* const target = static_cast<T*>(to);
  const auto* const sources = reinterpret_cast<const T* const*>(from);
  const double factor = is_floating ? scaling.postscale / scaling.divisor : scaling.postscale;
  const bool converts = std::is_same_v<T, Float16> && converts_float16();
  if (converts || scaling.prescale != 1.0 || (!is_floating && (factor != 1.0 || scaling.divisor != 1))) {
    return reduce_scaled(op, target, sources, sources_count, count, scaling.prescale, factor, scaling.divisor);
  }
  if (sources_count == 1) {
    const T* const source = sources[0];
    HOROVODISH_INDEPENDENT
    for (size_t i = 0; i < count; ++i) target[i] = finished<T>(E::load(source[i]), factor);
    return;
  }
  with_operator(op, [&](auto combine) __attribute__((always_inline)) {
    reduce_unscaled(target, sources, sources_count, count, factor, combine);
  });
}

#define HOROVODISH_REDUCE(T)                                                                              \
  HOROVODISH_VARIANTS(void, reduce_as,                                                                    \
                      (std::type_identity<T> type, ReduceOp op, void* target, const void* const* sources, \
                       size_t sources_count, size_t count, const Scaling& scaling),                       \
                      (type, op, target, sources, sources_count, count, scaling),                         \
                      return reduce_typed(type, op, target, sources, sources_count, count, scaling))
HOROVODISH_REDUCE(uint8_t)
HOROVODISH_REDUCE(int8_t)
HOROVODISH_REDUCE(int16_t)
HOROVODISH_REDUCE(int32_t)
HOROVODISH_REDUCE(int64_t)
HOROVODISH_REDUCE(Float16)
HOROVODISH_REDUCE(BFloat16)
HOROVODISH_REDUCE(float)
HOROVODISH_REDUCE(double)
#undef HOROVODISH_REDUCE

// Independent sums, so that the compiler can keep them in vector registers.
constexpr size_t kLanes = 16;

template <class T>
HOROVODISH_INLINE double dot_typed(std::type_identity<T>, const void* of_left, const void* of_right, size_t count) {
  const auto* const left = static_cast<const T*>(of_left);
  const auto* const right = static_cast<const T*>(of_right);
  using E = Element<T>;
  double lanes[kLanes] = {};
  const size_t whole = count - count % kLanes;
  for (size_t begin = 0; begin < whole; begin += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] +=
          static_cast<double>(E::load(left[begin + lane])) * static_cast<double>(E::load(right[begin + lane]));
    }
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  for (size_t i = whole; i < count; ++i) {
    sum += static_cast<double>(E::load(left[i])) * static_cast<double>(E::load(right[i]));
  }
  return sum;
}

template <class T>
HOROVODISH_INLINE void weighted_sum_typed(std::type_identity<T>, void* to, const void* const* from,
                                          const double* weights, size_t sources_count, size_t count) {
  auto* const target = static_cast<T*>(to);
  const auto* const sources = reinterpret_cast<const T* const*>(from);
  using E = Element<T>;
  using A = typename E::Accumulator;
  A accumulator[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    std::fill_n(accumulator, length, A{0});
    for (size_t s = 0; s < sources_count; ++s) {
      const T* source = sources[s] + begin;
      for (size_t i = 0; i < length; ++i) accumulator[i] += scaled<A>(E::load(source[i]), weights[s]);
    }
    for (size_t i = 0; i < length; ++i) target[begin + i] = E::store(accumulator[i]);
  }
}

template <class T>
HOROVODISH_INLINE void load_typed(std::type_identity<T>, const void* from, float* target, size_t count, double factor) {
  const auto* const source = static_cast<const T*>(from);
  const auto scale = static_cast<typename Element<T>::Accumulator>(factor);
  for (size_t i = 0; i < count; ++i) target[i] = static_cast<float>(Element<T>::load(source[i]) * scale);
}
template <class T>
HOROVODISH_INLINE void store_typed(std::type_identity<T>, const float* source, void* to, size_t count, double factor) {
  auto* const target = static_cast<T*>(to);
  for (size_t i = 0; i < count; ++i) target[i] = finished<T>(typename Element<T>::Accumulator{source[i]}, factor);
}

#define HOROVODISH_FLOATS(T)                                                                                           \
  HOROVODISH_VARIANTS(void, load_as,                                                                                   \
                      (std::type_identity<T> type, const void* source, float* target, size_t count, double factor),    \
                      (type, source, target, count, factor), return load_typed(type, source, target, count, factor))   \
  HOROVODISH_VARIANTS(void, store_as,                                                                                  \
                      (std::type_identity<T> type, const float* source, void* target, size_t count, double factor),    \
                      (type, source, target, count, factor), return store_typed(type, source, target, count, factor))  \
  HOROVODISH_VARIANTS(double, dot_as, (std::type_identity<T> type, const void* left, const void* right, size_t count), \
                      (type, left, right, count), return dot_typed(type, left, right, count))                          \
  HOROVODISH_VARIANTS(void, weighted_sum_as,                                                                           \
                      (std::type_identity<T> type, void* target, const void* const* sources, const double* weights,    \
                       size_t sources_count, size_t count),                                                            \
                      (type, target, sources, weights, sources_count, count),                                          \
                      return weighted_sum_typed(type, target, sources, weights, sources_count, count))
HOROVODISH_FLOATS(Float16)
HOROVODISH_FLOATS(BFloat16)
HOROVODISH_FLOATS(float)
HOROVODISH_FLOATS(double)
#undef HOROVODISH_FLOATS

template <class T>
void fill_typed(std::type_identity<T>, ReduceOp op, void* target, size_t count) {
  using A = typename Element<T>::Accumulator;
  using Limits = std::numeric_limits<A>;
  A value = 0;
  if (op == ReduceOp::product) value = 1;
  if (op == ReduceOp::min) value = Limits::has_infinity ? Limits::infinity() : Limits::max();
  if (op == ReduceOp::max) value = Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
  std::fill_n(static_cast<T*>(target), count, Element<T>::store(value));
}

// Calls function(std::type_identity<T>) for the type of the elements.
template <class Function>
auto with_type(DType dtype, Function function) {
  switch (dtype) {
    case DType::uint8:
      return function(std::type_identity<uint8_t>{});
    case DType::int8:
      return function(std::type_identity<int8_t>{});
    case DType::int16:
      return function(std::type_identity<int16_t>{});
    case DType::int32:
      return function(std::type_identity<int32_t>{});
    case DType::int64:
      return function(std::type_identity<int64_t>{});
    case DType::float16:
      return function(std::type_identity<Float16>{});
    case DType::bfloat16:
      return function(std::type_identity<BFloat16>{});
    case DType::float32:
      return function(std::type_identity<float>{});
    case DType::float64:
      return function(std::type_identity<double>{});
    case DType::boolean:
    case DType::uint16:
    case DType::uint32:
    case DType::uint64:
      break;
  }
  throw std::logic_error(std::string(name_of(dtype)) + " has no reduction");
}

// The same for floating-point numbers.
template <class Function>
auto with_floating_type(DType dtype, Function function) {
  return with_type(dtype, [&]<class T>(std::type_identity<T> type) {
    if constexpr (kIsFloating<T>) return function(type);
    throw std::logic_error("only floating-point numbers have a dot product and a weighted sum");
    return decltype(function(std::type_identity<double>{}))();
  });
}

}  // namespace

void reduce(DType dtype, ReduceOp op, void* target, const void* const* sources, size_t sources_count, size_t count,
            const Scaling& scaling) {
  const StandardFloats mode;
  with_type(dtype, [&](auto type) { reduce_as(type, op, target, sources, sources_count, count, scaling); });
}

std::pair<Scaling, Scaling> in_stages(DType dtype, ReduceOp op, const Scaling& scaling, size_t contributions) {
  std::pair<Scaling, Scaling> staged{{.prescale = scaling.prescale},
                                     {.postscale = scaling.postscale, .divisor = scaling.divisor}};
  const double factor = std::abs(scaling.postscale / scaling.divisor);
  const bool adds = op == ReduceOp::sum || op == ReduceOp::average;
  if (dtype != DType::float16 || !adds || !(factor > 0 && factor < 1)) return staged;
  // Near zero, float16 has fewer digits. So partial results are not made smaller than the result, or smaller than the
  // largest sum requires.
  const double growth = static_cast<double>(contributions) * std::max(1.0, std::abs(scaling.prescale));
  const auto halvings = static_cast<int>(std::min<double>(-std::ilogb(factor), std::ceil(std::log2(growth))));
  staged.first.prescale = std::ldexp(staged.first.prescale, -halvings);
  staged.second.postscale = std::ldexp(staged.second.postscale, halvings);
  return staged;
}

void load_floats(DType dtype, const void* source, float* target, size_t count, double factor) {
  with_floating_type(dtype, [&](auto type) { load_as(type, source, target, count, factor); });
}
void store_floats(DType dtype, const float* source, void* target, size_t count, double factor) {
  with_floating_type(dtype, [&](auto type) { store_as(type, source, target, count, factor); });
}

void fill_identity(DType dtype, ReduceOp op, void* target, size_t count) {
  with_type(dtype == DType::boolean ? DType::uint8 : dtype, [&](auto type) { fill_typed(type, op, target, count); });
}

double dot(DType dtype, const void* left, const void* right, size_t count) {
  const StandardFloats mode;
  return with_floating_type(dtype, [&](auto type) { return dot_as(type, left, right, count); });
}

void weighted_sum(DType dtype, void* target, const void* const* sources, const double* weights, size_t sources_count,
                  size_t count) {
  const StandardFloats mode;
  with_floating_type(dtype, [&](auto type) { weighted_sum_as(type, target, sources, weights, sources_count, count); });
}

}  // namespace horovodish
