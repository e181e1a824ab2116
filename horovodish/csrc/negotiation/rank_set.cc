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
  return std::any_of(intervals_.begin(), intervals_.end(),
                     [&](const auto& interval) { return interval.first <= number && number <= interval.second; });
}

bool RankSet::overlaps(const RankSet& other) const {
  return std::ranges::any_of(intervals_, [&](const auto& own) {
    return std::any_of(other.intervals_.begin(), other.intervals_.end(),
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

void RankSet::encode(Writer& writer) const {
  writer.number(intervals_.size());
  for (const auto& [first, last] : intervals_) {
    writer.number(static_cast<uint64_t>(first));
    writer.number(static_cast<uint64_t>(last));
  }
}

RankSet RankSet::decode(Reader& reader) {
  RankSet set;
  for (size_t left = reader.count(); left > 0; --left) {
    const int first = reader.positive_int(), last = reader.positive_int();
    if (first > last || (!set.empty() && first <= set.intervals_.back().second + 1)) {
      throw std::runtime_error("control message: ranks out of order");
    }
    set.intervals_.emplace_back(first, last);
  }
  return set;
}

}  // namespace horovodish
