#include "negotiation/rank_set.h"

#include <algorithm>
#include <stdexcept>

namespace horovodish {

void RankSet::add(const RankSet& other) {
  if (other.empty()) return;
  intervals_.insert(intervals_.end(), other.intervals_.begin(), other.intervals_.end());
  std::ranges::sort(intervals_);
  std::vector<std::pair<int, int>> merged;
  for (const auto& interval : intervals_) {
    if (!merged.empty() && interval.first <= merged.back().second + 1) {
      merged.back().second = std::max(merged.back().second, interval.second);
    } else {
      merged.push_back(interval);
    }
  }
  intervals_ = std::move(merged);
}

void RankSet::remove(const RankSet& other) {
  for (const auto& [from, to] : other.intervals_) {
    std::vector<std::pair<int, int>> left;
    for (const auto& [first, last] : intervals_) {
      if (first < from) left.emplace_back(first, std::min(last, from - 1));
      if (to < last) left.emplace_back(std::max(first, to + 1), last);
    }
    intervals_ = std::move(left);
  }
}

int RankSet::count() const {
  int total = 0;
  for (const auto& [first, last] : intervals_) total += last - first + 1;
  return total;
}

bool RankSet::contains(WorldRank rank) const {
  const int number = number_of(rank);
  return std::ranges::any_of(
      intervals_, [&](const auto& interval) { return interval.first <= number && number <= interval.second; });
}

bool RankSet::overlaps(const RankSet& other) const {
  return std::ranges::any_of(intervals_, [&](const auto& own) {
    return std::ranges::any_of(other.intervals_,
                               [&](const auto& its) { return own.first <= its.second && its.first <= own.second; });
  });
}

std::string RankSet::text() const {
  std::string result = count() == 1 ? "rank " : "ranks ";
  bool first_interval = true;
  for (const auto& [first, last] : intervals_) {
    if (!first_interval) result += ", ";
    first_interval = false;
    result += std::to_string(first);
    if (last == first + 1) result += ", " + std::to_string(last);
    if (last > first + 1) result += "-" + std::to_string(last);
  }
  return result;
}

void RankSet::check() const {
  for (size_t i = 0; i < intervals_.size(); ++i) {
    const auto& [first, last] = intervals_[i];
    if (first > last || (i > 0 && first <= intervals_[i - 1].second + 1)) {
      throw std::runtime_error("control message: ranks out of order");
    }
  }
}

}  // namespace horovodish
