// A set of ranks of the world as sorted intervals: "all 512 ranks" is one interval, in memory and on the wire.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "negotiation/world_rank.h"

namespace horovodish {

class RankSet {
 public:
  RankSet() = default;
  explicit RankSet(WorldRank rank) : intervals_{{number_of(rank), number_of(rank)}} {}

  void add(const RankSet& other);
  void remove(const RankSet& other);
  int count() const;
  bool empty() const { return intervals_.empty(); }
  bool contains(WorldRank rank) const;
  bool overlaps(const RankSet& other) const;
  WorldRank first() const { return WorldRank(intervals_.front().first); }
  // "rank 3" or "ranks 0-2, 5".
  std::string text() const;

  static auto fields(auto& its) { return std::tie(its.intervals_); }
  void check() const;

 private:
  std::vector<std::pair<int, int>> intervals_;  // inclusive, sorted, neither overlapping nor adjacent
};

}  // namespace horovodish
