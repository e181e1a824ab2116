#include "planes/schedule.h"

#include <algorithm>

namespace horovodish {

namespace {

// Buffers of more segments than this go down a chain: the pipeline is then long enough to hide its depth.
constexpr size_t kChainSegments = 8;

struct Range {
  size_t begin, count;
};

std::vector<Range> segments_of(Range range, size_t segment) {
  std::vector<Range> result;
  for (size_t done = 0; done < range.count; done += segment) {
    result.push_back({range.begin + done, std::min(segment, range.count - done)});
  }
  return result;
}

Range shard_of(int shard, int ranks, size_t count) {
  const auto at = [&](int index) { return count * static_cast<size_t>(index) / static_cast<size_t>(ranks); };
  return {at(shard), at(shard + 1) - at(shard)};
}

}  // namespace

Schedule ring_allreduce(int rank, int ranks, size_t count, size_t segment) {
  Schedule schedule;
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  const auto shard = [&](int index) { return segments_of(shard_of((index + 2 * ranks) % ranks, ranks, count), segment); };
  // Sends and receives of a shard's segments, counted before its step.
  std::vector<size_t> sent_before(static_cast<size_t>(ranks));
  size_t received_before = 0;
  for (int step = 0; step < 2 * (ranks - 1); ++step) {
    const bool gather = step >= ranks - 1;
    const size_t received_now = schedule.receives.size();
    sent_before[static_cast<size_t>((rank - step + 2 * ranks) % ranks)] = schedule.sends.size();
    // A step sends what the step before received.
    size_t dependency = received_before;
    for (const Range& range : shard(rank - step)) {
      schedule.sends.push_back({next, range.begin, range.count, step == 0 ? 0 : ++dependency});
    }
    size_t overwritten = sent_before[static_cast<size_t>((rank - step - 1 + 2 * ranks) % ranks)];
    for (const Range& range : shard(rank - step - 1)) {
      const auto then = gather                ? Receive::Then::store
                        : step == ranks - 2 ? Receive::Then::reduce_finish
                                              : Receive::Then::reduce;
      schedule.receives.push_back({previous, range.begin, range.count, gather ? ++overwritten : 0, then});
    }
    received_before = received_now;
  }
  return schedule;
}

Schedule direct_allgather(int rank, int ranks, const std::vector<size_t>& begins, size_t segment) {
  Schedule schedule;
  const auto block = [&](int index) {
    const auto i = static_cast<size_t>(index);
    return segments_of({begins[i], begins[i + 1] - begins[i]}, segment);
  };
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
    for (const Range& range : block(rank)) schedule.sends.push_back({to, range.begin, range.count, 0});
    for (const Range& range : block(from)) {
      schedule.receives.push_back({from, range.begin, range.count, 0, Receive::Then::store});
    }
  }
  return schedule;
}

Schedule tree_broadcast(int rank, int ranks, int root, size_t count, size_t segment) {
  Schedule schedule;
  const std::vector<Range> segments = segments_of({0, count}, segment);
  const int position = (rank - root + ranks) % ranks;
  const auto rank_at = [&](int place) { return (place + root) % ranks; };
  int parent = 0;
  std::vector<int> children;
  if (segments.size() > kChainSegments) {
    parent = position - 1;
    if (position + 1 < ranks) children.push_back(position + 1);
  } else {
    // The parent lacks the lowest set bit of a position; the children add a lower bit each, the largest subtree first.
    int bit = 1;
    while (bit < ranks && (position & bit) == 0) bit *= 2;
    parent = position & ~bit;
    for (bit /= 2; bit > 0; bit /= 2) {
      if (position + bit < ranks) children.push_back(position + bit);
    }
  }
  for (size_t i = 0; i < segments.size(); ++i) {
    if (position > 0) {
      schedule.receives.push_back({rank_at(parent), segments[i].begin, segments[i].count, 0, Receive::Then::store});
    }
    for (const int child : children) {
      schedule.sends.push_back({rank_at(child), segments[i].begin, segments[i].count, position > 0 ? i + 1 : 0});
    }
  }
  return schedule;
}

}  // namespace horovodish
