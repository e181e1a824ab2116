// Codecs: short codes for float32 values, for slow links. A code loses information. Whoever encodes gets the error,
// value - decoded value, and can add it to the next values that it encodes.
//
// A codec encodes blocks of values, each by itself. If a value is NaN or infinite, all of its block decodes to NaN. The
// same values give the same bytes on every processor.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace horovodish {

// `automatic`: none or int8, whichever the ranks measure to be faster.
enum class CodecKind : uint8_t { none, int8, int4, onebit, ternary, topk, randomk, automatic };
inline constexpr std::array<std::string_view, 8> kCodecNames{"none",    "int8", "int4",    "onebit",
                                                             "ternary", "topk", "randomk", "auto"};
inline std::string_view name_of(CodecKind kind) { return kCodecNames[static_cast<size_t>(kind)]; }
// Returns whether the codec has a parameter for the share of the values that travel.
inline bool takes_share(CodecKind kind) { return kind == CodecKind::topk || kind == CodecKind::randomk; }

// The values of one block.
struct Block {
  size_t count;  // at most the size of the codec's block
  double share;  // of the values that travel, for the codecs that leave some out
  uint64_t seed;  // the same at encoding and decoding of a block
};

// The encoding of one block. A new codec is a file of its own and a row of the table below.
struct BlockCodec {
  size_t block;  // values
  // The size of the code.
  size_t (*bytes)(const Block& block);
  // Leaves the errors in place of the values. If a value is NaN or infinite, all errors of the block are NaN.
  void (*encode)(float* values, std::byte* code, const Block& block);
  // Adds the decoded values to `values` or replaces them.
  void (*decode)(const std::byte* code, float* values, const Block& block, bool adds);
};

extern const BlockCodec kInt8Codec, kInt4Codec, kOnebitCodec, kTernaryCodec, kTopkCodec, kRandomkCodec;
// In the order of CodecKind, without none and automatic.
inline constexpr std::array<const BlockCodec*, kCodecNames.size() - 2> kCodecs{
    &kInt8Codec, &kInt4Codec, &kOnebitCodec, &kTernaryCodec, &kTopkCodec, &kRandomkCodec};

// A codec with its parameter, for any number of values: the blocks' codes lie one after the other.
class Codec {
 public:
  // A multiple of every codec's block, so that callers can cut values here without knowing the codec.
  static constexpr size_t kTile = 4096;

  // `kind`: not none and not automatic.
  Codec(CodecKind kind, double share) : codec_(*kCodecs.at(static_cast<size_t>(kind) - 1)), share_(share) {}

  size_t block() const { return codec_.block; }
  size_t bytes(size_t count) const {
    const size_t rest = count % codec_.block;
    return count / codec_.block * codec_.bytes({codec_.block, share_, 0}) +
           (rest == 0 ? 0 : codec_.bytes({rest, share_, 0}));
  }
  void encode(float* values, size_t count, std::byte* code, uint64_t seed) const {
    for_each_block(count, seed, [&](size_t begin, const Block& block) {
      codec_.encode(values + begin, code, block);
      code += codec_.bytes(block);
    });
  }
  void decode(const std::byte* code, float* values, size_t count, uint64_t seed, bool adds) const {
    for_each_block(count, seed, [&](size_t begin, const Block& block) {
      codec_.decode(code, values + begin, block, adds);
      code += codec_.bytes(block);
    });
  }

 private:
  template <class Visit>
  void for_each_block(size_t count, uint64_t seed, Visit visit) const {
    for (size_t begin = 0; begin < count; begin += codec_.block) {
      visit(begin, Block{std::min(codec_.block, count - begin), share_, seed + begin});
    }
  }

  const BlockCodec& codec_;
  const double share_;
};

}  // namespace horovodish
