// The statement of a subtree of ranks that it is ready for one tensor (or a bucket, negotiated as a unit).
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

#include "negotiation/mask.h"
#include "negotiation/rank_set.h"

namespace horovodish {

// When some ranks have made a statement: the first time and the last, and which rank was last. Empty: no rank has.
struct Span {
  WorldRank last_rank{};
  double first_seconds = std::numeric_limits<double>::infinity(), last_seconds = -first_seconds;

  double seconds() const { return last_seconds - first_seconds; }
  void add(const Span& other) {
    first_seconds = std::min(first_seconds, other.first_seconds);
    if (other.last_seconds <= last_seconds) return;
    last_seconds = other.last_seconds;
    last_rank = other.last_rank;
  }
  static auto fields(auto& its) { return std::tie(its.last_rank, its.first_seconds, its.last_seconds); }
};

struct Statement {
  Span span;  // sent separately, as successive statements often have the same one
  RankSet joined = {};  // the joined ranks, which do not contribute
  Mask absent = {};  // members that none of the other ranks has a value for
  std::string values = {};  // carried values, of one rank after the other in the order of the tree; empty: none

  static auto fields(auto& its) { return std::tie(its.joined, its.absent, its.values); }
};

}  // namespace horovodish
