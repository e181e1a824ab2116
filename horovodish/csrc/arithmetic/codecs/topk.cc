// Blocks of 4096 values: the values of the largest magnitudes, and where they are. The others are 0.
#include <functional>

#include "arithmetic/codecs/packing.h"

namespace horovodish {

namespace {

namespace topk {
using Index = uint16_t;
constexpr size_t kBlock = 4096;

size_t bytes(const Block& block) { return kept_of(block) * (sizeof(float) + sizeof(Index)); }

HOROVODISH_INLINE void encode(float* values, std::byte* code, const Block& block) {
  int32_t bits[kBlock];
  for (size_t i = 0; i < block.count; ++i) bits[i] = magnitude_bits(values[i]);
  const size_t kept = kept_of(block);
  if (largest_bits(values, block.count) >= kInfinityBits) {
    return encode_nan(values, code, bytes(block), block.count);
  }
  std::nth_element(bits, bits + kept - 1, bits + block.count, std::greater<>());
  const int32_t least = bits[kept - 1];
  // Among equal magnitudes, the first ones are kept.
  auto equal = kept - static_cast<size_t>(std::count_if(bits, bits + kept, [=](int32_t its) { return its > least; }));
  std::byte* indices = code + kept * sizeof(float);
  for (size_t i = 0; i < block.count; ++i) {
    const int32_t its = magnitude_bits(values[i]);
    if (its < least || (its == least && equal == 0)) continue;
    if (its == least) --equal;
    const auto index = static_cast<Index>(i);
    write_float(code, values[i]);
    std::memcpy(indices, &index, sizeof index);
    code += sizeof(float);
    indices += sizeof index;
    values[i] = 0;
  }
}

HOROVODISH_INLINE void decode(const std::byte* code, float* values, const Block& block, bool adds) {
  const size_t kept = kept_of(block);
  const float first = read_float(code);
  if (first != first) return static_cast<void>(std::fill_n(values, block.count, first));
  if (!adds) std::fill_n(values, block.count, 0.0f);
  for (size_t i = 0; i < kept; ++i) {
    Index index;
    std::memcpy(&index, code + kept * sizeof(float) + i * sizeof index, sizeof index);
    values[index % block.count] += read_float(code + i * sizeof(float));
  }
}
}  // namespace topk

HOROVODISH_CODEC(topk)

}  // namespace

const BlockCodec kTopkCodec{topk::kBlock, topk::bytes, encode_topk, decode_topk};

}  // namespace horovodish
