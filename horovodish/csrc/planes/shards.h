// How elements are dealt out to the ranks that work on them.
#pragma once

#include <algorithm>
#include <cstddef>

namespace horovodish {

inline size_t ceil_divide(size_t a, size_t b) { return (a + b - 1) / b; }

// Where shard `index` of `count` elements of `item_bytes` begins; `count` for those that are left empty. Shards begin at
// multiples of a cache line, so that no two ranks write to one.
inline size_t shard_begin(size_t count, size_t shards, size_t item_bytes, size_t index) {
  constexpr size_t kCacheLine = 64;
  const size_t line = kCacheLine / item_bytes;
  return std::min(index * ceil_divide(ceil_divide(count, shards), line) * line, count);
}

// The size of a chunk that the ranks of several hosts exchange in `pieces` that travel on their own: `wanted` rounded up, so
// that each piece is whole segments, since the time of a message depends little on its size. At most `most`.
inline size_t exchanged_chunk(size_t wanted, size_t segment, size_t pieces, size_t most) {
  const size_t least = segment * pieces;
  return least > most ? most : std::min(ceil_divide(wanted, least), most / least) * least;
}

}  // namespace horovodish
