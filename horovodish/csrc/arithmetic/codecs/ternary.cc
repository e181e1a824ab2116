// Blocks of 1024 values: a scale, and -1, 0 or 1 for each value. Values with a magnitude above 0.7 of the mean
// magnitude become -1 or 1, and the scale is the mean of their magnitudes. Li, Zhang and Liu, "Ternary Weight
// Networks", 2016.
#include "arithmetic/codecs/packing.h"

namespace horovodish {

namespace {

namespace ternary {
constexpr float kThreshold = 0.7f;  // of the mean magnitude
constexpr float kAll = -1;

HOROVODISH_INLINE float value_of(uint32_t symbol, float scale) {
  return static_cast<float>(static_cast<int32_t>(symbol & 1) - static_cast<int32_t>(symbol >> 1)) * scale;
}

size_t bytes(const Block& block) { return sizeof(float) + Planes<2>::bytes(block.count); }

HOROVODISH_INLINE void encode(float* values, std::byte* code, const Block& block) {
  const float mean = magnitudes(values, block.count, kAll).mean();
  if (magnitude_bits(mean) >= kInfinityBits) return encode_nan(values, code, bytes(block), block.count);
  const float threshold = kThreshold * mean;
  const float scale = magnitudes(values, block.count, threshold).mean();
  write_float(code, scale);
  Planes<2>::pack(values, block.count, code + sizeof scale,
                  [scale, threshold](float& value) __attribute__((always_inline)) {
                    const uint32_t plus = value > threshold ? 1 : 0, minus = value < -threshold ? 1 : 0;
                    value -= value_of(plus | minus << 1, scale);
                    return plus | minus << 1;
                  });
}

HOROVODISH_INLINE void decode(const std::byte* code, float* values, const Block& block, bool adds) {
  const float scale = read_float(code);
  Planes<2>::unpack(code + sizeof scale, values, block.count, adds,
                    [=](uint32_t symbol) __attribute__((always_inline)) { return value_of(symbol, scale); });
}
}  // namespace ternary

HOROVODISH_CODEC(ternary)

}  // namespace

const BlockCodec kTernaryCodec{1024, ternary::bytes, encode_ternary, decode_ternary};

}  // namespace horovodish
