// The common parts of several codecs: statistics of a block, and symbols of a few bits in bytes.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "arithmetic/codecs/codec.h"
#include "arithmetic/instructions.h"

namespace horovodish {

inline constexpr int32_t kInfinityBits = 0x7f800000;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

HOROVODISH_INLINE int32_t magnitude_bits(float value) { return std::bit_cast<int32_t>(value) & 0x7fffffff; }

// The bits of the largest magnitude. As integers, magnitudes have the same order, then infinity, then NaN.
HOROVODISH_INLINE int32_t largest_bits(const float* values, size_t count) {
  int32_t largest = 0;
  for (size_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(values[i]));
  return largest;
}

struct Magnitudes {
  double sum = 0;  // the sum of a block of float32 values cannot overflow, and its mean is a float32 value
  int32_t count = 0;

  float mean() const { return count == 0 ? 0.0f : static_cast<float>(sum / count); }
};
// Of the values whose magnitude is greater than `above`. The order of the additions is fixed.
HOROVODISH_INLINE Magnitudes magnitudes(const float* values, size_t count, float above) {
  constexpr size_t kLanes = 16;  // independent sums, which the compiler keeps in vector registers
  double sums[kLanes] = {};
  int32_t counts[kLanes] = {};
  const auto add = [&](size_t i, size_t lane) __attribute__((always_inline)) {
    const int32_t bits = magnitude_bits(values[i]);
    const int32_t counts_too = -static_cast<int32_t>(!(std::bit_cast<float>(bits) <= above));  // all bits or none
    sums[lane] += std::bit_cast<float>(bits & counts_too);
    counts[lane] -= counts_too;
  };
  const size_t whole = count / kLanes * kLanes;
  for (size_t begin = 0; begin < whole; begin += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) add(begin + lane, lane);
  }
  for (size_t i = whole; i < count; ++i) add(i, i - whole);
  Magnitudes all;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    all.sum += sums[lane];
    all.count += counts[lane];
  }
  return all;
}

// Added to a number below 2^22, this rounds it to the nearest integer (ties to even), which is then in the lowest bits.
inline constexpr float kRounder = 0x1.8p23f;
// The scale, so that `levels` steps of it reach the largest magnitude. 0, so that everything stays in the error, if the
// inverse would not be finite. NaN if the magnitude is not finite. The product of levels and scale is finite: a
// quotient that was rounded up would make it overflow.
HOROVODISH_INLINE float scale_of(int32_t bits, float levels) {
  if (bits >= kInfinityBits) return kNan;
  const float most = std::numeric_limits<float>::max() / levels * (1 - std::numeric_limits<float>::epsilon());
  const float scale = std::min(std::bit_cast<float>(bits) / levels, most);
  return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
}

HOROVODISH_INLINE void write_float(std::byte* code, float value) { std::memcpy(code, &value, sizeof value); }
HOROVODISH_INLINE float read_float(const std::byte* code) {
  float value;
  std::memcpy(&value, code, sizeof value);
  return value;
}
// The code of a block with NaN or infinity begins with NaN. All its errors are NaN.
inline void encode_nan(float* values, std::byte* code, size_t bytes, size_t count) {
  std::memset(code, 0, bytes);
  write_float(code, kNan);
  std::fill_n(values, count, kNan);
}

// Symbols of kBits bits, several to a byte, in planes: symbol i of a block is in byte i % stride, at place i / stride, so that
// neighbours are packed by the same vector instruction.
template <unsigned kBits>
struct Planes {
  static constexpr size_t kPlanes = 8 / kBits;
  static size_t bytes(size_t count) { return (count + kPlanes - 1) / kPlanes; }

  // `symbol(value)` returns the symbol and replaces the value by the error.
  template <class Symbol>
  static HOROVODISH_INLINE void pack(float* values, size_t count, std::byte* code, Symbol symbol) {
    auto* const out = reinterpret_cast<uint8_t*>(code);
    const size_t stride = bytes(count);
    for (size_t i = 0; i < stride; ++i) out[i] = static_cast<uint8_t>(symbol(values[i]));
    for (size_t plane = 1; plane < kPlanes && plane * stride < count; ++plane) {
      float* const its = values + plane * stride;
      const size_t length = std::min(stride, count - plane * stride);
      for (size_t i = 0; i < length; ++i) out[i] |= static_cast<uint8_t>(symbol(its[i]) << (kBits * plane));
    }
  }
  // `value(symbol)` is the decoded value.
  template <class Value>
  static HOROVODISH_INLINE void unpack(const std::byte* code, float* values, size_t count, bool adds, Value value) {
    const auto* const in = reinterpret_cast<const uint8_t*>(code);
    const size_t stride = bytes(count);
    constexpr uint32_t kMask = (1u << kBits) - 1;
    for (size_t plane = 0; plane < kPlanes && plane * stride < count; ++plane) {
      float* const its = values + plane * stride;
      const size_t length = std::min(stride, count - plane * stride);
      if (adds) {
        for (size_t i = 0; i < length; ++i) its[i] += value(uint32_t{in[i]} >> (kBits * plane) & kMask);
      } else {
        for (size_t i = 0; i < length; ++i) its[i] = value(uint32_t{in[i]} >> (kBits * plane) & kMask);
      }
    }
  }
};

// How many values of a block travel if only a share of them does.
inline size_t kept_of(const Block& block) {
  const auto kept = static_cast<size_t>(std::ceil(block.share * static_cast<double>(block.count)));
  return std::clamp<size_t>(kept, 1, block.count);
}

#define HOROVODISH_CODEC(NAME)                                                                                    \
  HOROVODISH_VARIANTS(void, encode_##NAME, (float* values, std::byte* code, const Block& block),                  \
                      (values, code, block), return NAME::encode(values, code, block))                            \
  HOROVODISH_VARIANTS(void, decode_##NAME, (const std::byte* code, float* values, const Block& block, bool adds), \
                      (code, values, block, adds), return NAME::decode(code, values, block, adds))

}  // namespace horovodish
