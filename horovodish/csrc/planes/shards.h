// How elements are divided among the ranks that work on them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "operation/range.h"

namespace horovodish {

inline constexpr size_t kCacheLine = 64;

// Shard `index` of elements of `item_bytes`; the last ones may be empty. Shards begin at multiples of a cache line, so
// that no two ranks write to the same line.
inline Range shard_of(Range whole, size_t shards, size_t item_bytes, size_t index) {
  const size_t line = kCacheLine / item_bytes;
  const Range shard = piece_of(whole.count, ceil_divide(ceil_divide(whole.count, shards), line) * line, index);
  return {whole.begin + shard.begin, shard.count};
}

// How ranks of several hosts divide a chunk: into as many shards as the largest host has ranks, or fewer if there are
// too few tags. On every host, shard i belongs to rank i % (ranks of that host).
struct HostShards {
  // `hosts`: the ranks of each host. `tags`: how many tags the exchanges of one chunk may use.
  HostShards(const std::vector<std::vector<int>>& hosts, size_t tags) {
    const auto [fewest, most] = std::minmax_element(
        hosts.begin(), hosts.end(), [](const auto& one, const auto& other) { return one.size() < other.size(); });
    fewest_ranks = fewest->size();
    places = most->size();
    count = std::min(places, tags * fewest_ranks);
  }

  // The number of a shard's tag, from 0. All shards of a chunk travel at once. Two shards of the same two ranks are at
  // least the smallest host's size apart, so they have different tags.
  size_t tag(size_t shard) const { return shard / fewest_ranks; }

  size_t fewest_ranks, places;  // of the smallest host, and of the largest one
  size_t count;                 // shards
};

// The size of a chunk that the ranks of several hosts exchange in `pieces` separate pieces: `wanted`, rounded up so
// that each piece is whole segments, because the time of a message depends little on its size. At most `most`.
inline size_t exchanged_chunk(size_t wanted, size_t segment, size_t pieces, size_t most) {
  const size_t least = segment * pieces;
  return least > most ? most : std::min(ceil_divide(wanted, least), most / least) * least;
}

}  // namespace horovodish
