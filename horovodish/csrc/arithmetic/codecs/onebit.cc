// Blocks of 4096 values: the mean magnitude, and the sign of each value. Seide et al., "1-Bit Stochastic Gradient Descent", 2014.
#include "arithmetic/codecs/packing.h"

namespace horovodish {

namespace {

namespace onebit {
size_t bytes(const Block& block) { return sizeof(float) + Planes<1>::bytes(block.count); }

HOROVODISH_INLINE void encode(float* values, std::byte* code, const Block& block) {
  constexpr float kAll = -1;
  const float mean = magnitudes(values, block.count, kAll).mean();
  if (magnitude_bits(mean) >= kInfinityBits) return encode_nan(values, code, bytes(block), block.count);
  write_float(code, mean);
  const uint32_t bits = std::bit_cast<uint32_t>(mean);
  Planes<1>::pack(values, block.count, code + sizeof mean, [=](float& value) __attribute__((always_inline)) {
    const uint32_t sign = std::bit_cast<uint32_t>(value) & 0x80000000;
    value -= std::bit_cast<float>(bits | sign);
    return sign >> 31;
  });
}

HOROVODISH_INLINE void decode(const std::byte* code, float* values, const Block& block, bool adds) {
  const uint32_t bits = std::bit_cast<uint32_t>(read_float(code));
  Planes<1>::unpack(code + sizeof bits, values, block.count, adds, [=](uint32_t symbol) __attribute__((always_inline)) {
    return std::bit_cast<float>(bits | symbol << 31);
  });
}
}  // namespace onebit

HOROVODISH_CODEC(onebit)

}  // namespace

const BlockCodec kOnebitCodec{4096, onebit::bytes, encode_onebit, decode_onebit};

}  // namespace horovodish
