// Blocks of 64 values: the upper half of a scale, and half a byte for each value. A value that is small in its block
// arrives only now and then, as a whole step, so its mean square is too large. Adam divides by that mean. The smaller
// the block, the fewer such values.
#include "arithmetic/codecs/packing.h"

namespace horovodish {

namespace {

namespace int4 {
constexpr size_t kBlock = 64;
constexpr float kLevels = 7;
constexpr uint32_t kZero = 8;  // the symbol
constexpr size_t kScaleBytes = sizeof(uint16_t);

// Rounds towards zero by less than 1 %, so the largest value is still nearest to the last step.
HOROVODISH_INLINE void write_scale(std::byte* code, float scale) {
  const auto upper = static_cast<uint16_t>(std::bit_cast<uint32_t>(scale) >> 16);
  std::memcpy(code, &upper, sizeof upper);
}
HOROVODISH_INLINE float read_scale(const std::byte* code) {
  uint16_t upper;
  std::memcpy(&upper, code, sizeof upper);
  return std::bit_cast<float>(uint32_t{upper} << 16);
}

HOROVODISH_INLINE void encode_some(float* values, std::byte* code, size_t count) {
  write_scale(code, scale_of(largest_bits(values, count), kLevels));
  const float scale = read_scale(code);
  if (scale != scale) {
    std::fill(code + kScaleBytes, code + kScaleBytes + Planes<4>::bytes(count), std::byte{0});
    std::fill_n(values, count, kNan);
    return;
  }
  const float inverse = scale > 0 ? 1 / scale : 0;
  Planes<4>::pack(values, count, code + kScaleBytes, [=](float& value) __attribute__((always_inline)) {
    const float rounded = value * inverse + kRounder;
    value -= (rounded - kRounder) * scale;
    return (std::bit_cast<uint32_t>(rounded) + kZero) & 15;
  });
}

HOROVODISH_INLINE void decode_some(const std::byte* code, float* values, size_t count, bool adds) {
  const float scale = read_scale(code);
  Planes<4>::unpack(code + kScaleBytes, values, count, adds, [=](uint32_t symbol) __attribute__((always_inline)) {
    return static_cast<float>(static_cast<int32_t>(symbol - kZero)) * scale;
  });
}

size_t bytes(const Block& block) { return kScaleBytes + Planes<4>::bytes(block.count); }

// If the compiler knows the number of values, it makes instructions without loops.
HOROVODISH_INLINE void encode(float* values, std::byte* code, const Block& block) {
  block.count == kBlock ? encode_some(values, code, kBlock) : encode_some(values, code, block.count);
}
HOROVODISH_INLINE void decode(const std::byte* code, float* values, const Block& block, bool adds) {
  block.count == kBlock ? decode_some(code, values, kBlock, adds) : decode_some(code, values, block.count, adds);
}
}  // namespace int4

HOROVODISH_CODEC(int4)

}  // namespace

const BlockCodec kInt4Codec{int4::kBlock, int4::bytes, encode_int4, decode_int4};

}  // namespace horovodish
