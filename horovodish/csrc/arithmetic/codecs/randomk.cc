// Blocks of 4096 values: some of the values. Both sides draw the same places, so places do not travel. The other values
// are 0.
#include "arithmetic/codecs/packing.h"

namespace horovodish {

namespace {

// A generator without state: number `counter` of the sequence of a seed. Steele, Lea and Flood, "Fast Splittable Pseudorandom
// Number Generators", 2014.
uint64_t drawn(uint64_t seed, uint64_t counter) {
  uint64_t bits = seed + (counter + 1) * 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

namespace randomk {
size_t bytes(const Block& block) { return kept_of(block) * sizeof(float); }

// The block is cut into a cell for each travelling value, and one value of each cell travels.
size_t place(const Block& block, uint64_t seed, size_t cell, size_t cells) {
  const size_t begin = cell * block.count / cells, end = (cell + 1) * block.count / cells;
  return begin + drawn(seed, cell) % (end - begin);
}

HOROVODISH_INLINE void encode(float* values, std::byte* code, const Block& block) {
  if (largest_bits(values, block.count) >= kInfinityBits) {
    return encode_nan(values, code, bytes(block), block.count);
  }
  const size_t cells = kept_of(block);
  const uint64_t seed = drawn(block.seed, 0);  // seeds of neighbours differ by little
  for (size_t cell = 0; cell < cells; ++cell) {
    float& value = values[place(block, seed, cell, cells)];
    write_float(code + cell * sizeof value, value);
    value = 0;
  }
}

HOROVODISH_INLINE void decode(const std::byte* code, float* values, const Block& block, bool adds) {
  const float first = read_float(code);
  if (first != first) return static_cast<void>(std::fill_n(values, block.count, first));
  if (!adds) std::fill_n(values, block.count, 0.0f);
  const size_t cells = kept_of(block);
  const uint64_t seed = drawn(block.seed, 0);
  for (size_t cell = 0; cell < cells; ++cell) {
    values[place(block, seed, cell, cells)] += read_float(code + cell * sizeof(float));
  }
}
}  // namespace randomk

HOROVODISH_CODEC(randomk)

}  // namespace

const BlockCodec kRandomkCodec{4096, randomk::bytes, encode_randomk, decode_randomk};

}  // namespace horovodish
