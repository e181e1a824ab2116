// float16 and bfloat16 as bits, with branch-free conversions that compilers turn into vector code.
// Both directions round to nearest even and keep infinities and NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace horovodish {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// Bits whose upper half is the nearest bfloat16, for results of arithmetic on bfloat16 numbers. In such a NaN the lower
// bits are zero, so rounding does not change the upper half.
inline uint32_t rounded_bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return bits + 0x7fff + ((bits >> 16) & 1);
}
inline BFloat16 to_bfloat16(float value) { return {static_cast<uint16_t>(rounded_bits(value) >> 16)}; }

inline float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t magnitude = value.bits & 0x7fff;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  // Below 2^-14 the digits have no leading one. They get one, which is then subtracted. No intermediate float is a
  // denormal.
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(normal + (1u << 23)) - 0x1p-14f);
  const uint32_t finite = magnitude < 0x400 ? denormal : normal;
  const uint32_t special = (magnitude << 13) | 0x7f800000;
  return std::bit_cast<float>(sign | (magnitude >= 0x7c00 ? special : finite));
}

inline Float16 to_float16(float value) {
  const uint32_t all = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (all >> 16) & 0x8000;
  const uint32_t magnitude = all & 0x7fffffff;
  // Below 2^-14 the result is a denormal: adding 0.5 lets the float unit round at the right bit.
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t finite = magnitude < (113u << 23) ? denormal : normal;
  return {static_cast<uint16_t>(sign | (magnitude >= 0x477ff000 ? special : finite))};
}

}  // namespace horovodish
