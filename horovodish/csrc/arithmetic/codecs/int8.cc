// Blocks of 256 values: a scale, and a byte for each value.
#include "arithmetic/codecs/packing.h"

namespace horovodish {

namespace {

namespace int8 {
constexpr float kLevels = 127;

size_t bytes(const Block& block) { return sizeof(float) + block.count; }

HOROVODISH_INLINE void encode(float* values, std::byte* code, const Block& block) {
  const size_t count = block.count;  // a local copy: for the compiler, a written byte may be part of `block`
  const float scale = scale_of(largest_bits(values, count), kLevels);
  if (scale != scale) return encode_nan(values, code, bytes(block), count);
  const float inverse = scale > 0 ? 1 / scale : 0;
  write_float(code, scale);
  auto* const out = reinterpret_cast<uint8_t*>(code + sizeof scale);
  for (size_t i = 0; i < count; ++i) {
    const float rounded = values[i] * inverse + kRounder;
    out[i] = static_cast<uint8_t>(std::bit_cast<uint32_t>(rounded));
    values[i] -= (rounded - kRounder) * scale;
  }
}

HOROVODISH_INLINE void decode(const std::byte* code, float* values, const Block& block, bool adds) {
  const float scale = read_float(code);
  const auto* const in = reinterpret_cast<const int8_t*>(code + sizeof scale);
  if (adds) {
    for (size_t i = 0; i < block.count; ++i) values[i] += static_cast<float>(in[i]) * scale;
  } else {
    for (size_t i = 0; i < block.count; ++i) values[i] = static_cast<float>(in[i]) * scale;
  }
}
}  // namespace int8

HOROVODISH_CODEC(int8)

}  // namespace

const BlockCodec kInt8Codec{256, int8::bytes, encode_int8, decode_int8};

}  // namespace horovodish
