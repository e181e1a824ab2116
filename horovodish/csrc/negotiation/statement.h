// What a subtree of ranks states about one tensor (or a bucket, negotiated as a unit): that it is ready for it.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "negotiation/mask.h"
#include "negotiation/rank_set.h"

namespace horovodish {

// When some ranks have made a statement: the first of them and the last, and which one that was.
struct Span {
  std::optional<WorldRank> last_rank = {};  // none: nobody has
  double first_seconds = 0, last_seconds = 0;

  double seconds() const { return last_seconds - first_seconds; }
  void add(const Span& other) {
    if (!last_rank || other.first_seconds < first_seconds) first_seconds = other.first_seconds;
    if (!last_rank || other.last_seconds > last_seconds) {
      last_seconds = other.last_seconds;
      last_rank = other.last_rank;
    }
  }
};

struct Statement {
  Span span;
  RankSet joined = {};  // those that have joined, and do not contribute
  Mask absent = {};  // members that none of the others has a value for
};

// The requests that were made under one name, and by whom: one, unless the ranks disagree.
using Signatures = std::vector<std::pair<std::string, RankSet>>;

}  // namespace horovodish
