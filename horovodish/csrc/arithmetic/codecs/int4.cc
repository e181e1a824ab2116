// Blocks of 1024 values: a scale, and half a byte for each value.
#include "arithmetic/codecs/packing.h"

namespace horovodish {

namespace {

namespace int4 {
constexpr float kLevels = 7;
constexpr uint32_t kZero = 8;  // the symbol

size_t bytes(const Block& block) { return sizeof(float) + Planes<4>::bytes(block.count); }

HOROVODISH_INLINE void encode(float* values, std::byte* code, const Block& block) {
  const float scale = scale_of(largest_bits(values, block.count), kLevels);
  if (scale != scale) return encode_nan(values, code, bytes(block), block.count);
  const float inverse = scale > 0 ? 1 / scale : 0;
  write_float(code, scale);
  Planes<4>::pack(values, block.count, code + sizeof scale, [=](float& value) __attribute__((always_inline)) {
    const float rounded = value * inverse + kRounder;
    value -= (rounded - kRounder) * scale;
    return (std::bit_cast<uint32_t>(rounded) + kZero) & 15;
  });
}

HOROVODISH_INLINE void decode(const std::byte* code, float* values, const Block& block, bool adds) {
  const float scale = read_float(code);
  Planes<4>::unpack(code + sizeof scale, values, block.count, adds,
                    [=](uint32_t symbol) __attribute__((always_inline)) {
                      return static_cast<float>(static_cast<int32_t>(symbol - kZero)) * scale;
                    });
}
}  // namespace int4

HOROVODISH_CODEC(int4)

}  // namespace

const BlockCodec kInt4Codec{1024, int4::bytes, encode_int4, decode_int4};

}  // namespace horovodish
