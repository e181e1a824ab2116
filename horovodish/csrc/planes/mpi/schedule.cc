#include "planes/mpi/schedule.h"

#include <algorithm>

#include "planes/shards.h"

namespace horovodish {

namespace {

// Buffers of more segments than this go down a chain: the pipeline is then long enough to hide its depth.
constexpr size_t kChainSegments = 8;

std::vector<Range> segments_of(Range range, size_t segment) {
  std::vector<Range> result;
  for (size_t done = 0; done < range.count; done += segment) {
    result.push_back({range.begin + done, std::min(segment, range.count - done)});
  }
  return result;
}

Range between(const std::vector<size_t>& begins, int index) {
  const auto i = static_cast<size_t>(index);
  return {begins[i], begins[i + 1] - begins[i]};
}

// `steps` of the ring, each of which sends on what the step before received; the shards rotate so that rank i finishes
// shard i after ranks - 1 steps. The steps after those pass finished shards round.
Schedule ring(int rank, int ranks, const std::vector<size_t>& begins, size_t segment, int steps) {
  Schedule schedule;
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  const auto shard_at = [&](int index) { return (index + 3 * ranks) % ranks; };
  std::vector<size_t> sent_before(static_cast<size_t>(ranks));  // by shard: sends before it was last sent
  size_t received_before = 0;
  for (int step = 0; step < steps; ++step) {
    const int sent = shard_at(rank - step - 1), received = shard_at(rank - step - 2);
    const bool gather = step >= ranks - 1;
    const size_t received_now = schedule.receives.size();
    sent_before[static_cast<size_t>(sent)] = schedule.sends.size();
    size_t dependency = received_before;
    for (const Range& range : segments_of(between(begins, sent), segment)) {
      schedule.sends.push_back({next, range.begin, range.count, step == 0 ? 0 : ++dependency});
    }
    size_t overwritten = sent_before[static_cast<size_t>(received)];
    for (const Range& range : segments_of(between(begins, received), segment)) {
      const auto then = gather              ? Receive::Then::store
                        : step == ranks - 2 ? Receive::Then::reduce_finish
                                            : Receive::Then::reduce;
      schedule.receives.push_back({previous, range.begin, range.count, gather ? ++overwritten : 0, then});
    }
    received_before = received_now;
  }
  return schedule;
}

// One step with every other rank, beginning with the next one, so that no rank is everybody's first.
template <class SentTo, class ReceivedFrom>
Schedule exchange(int rank, int ranks, size_t segment, SentTo sent_to, ReceivedFrom received_from) {
  Schedule schedule;
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
    for (const Range& range : segments_of(sent_to(to), segment)) {
      schedule.sends.push_back({to, range.begin, range.count, 0});
    }
    for (const Range& range : segments_of(received_from(from), segment)) {
      schedule.receives.push_back({from, range.begin, range.count, 0, Receive::Then::store});
    }
  }
  return schedule;
}

}  // namespace

Schedule ring_reduce_scatter(int rank, int ranks, const std::vector<size_t>& begins, size_t segment) {
  return ring(rank, ranks, begins, segment, ranks - 1);
}

Schedule ring_allreduce(int rank, int ranks, size_t count, size_t segment) {
  const auto n = static_cast<size_t>(ranks);
  std::vector<size_t> begins(n + 1);
  for (size_t i = 0; i <= n; ++i) begins[i] = count / n * i + count % n * i / n;
  return ring(rank, ranks, begins, segment, 2 * (ranks - 1));
}

Schedule pair_allreduce(int rank, size_t count, size_t segment) {
  Schedule schedule;
  for (const Range& range : segments_of({0, count}, segment)) {
    schedule.sends.push_back({1 - rank, range.begin, range.count, 0});
    schedule.receives.push_back(
        {1 - rank, range.begin, range.count, schedule.sends.size(), Receive::Then::reduce_finish});
  }
  return schedule;
}

Schedule direct_exchange(int rank, int ranks, const std::vector<size_t>& sent, const std::vector<size_t>& received,
                         size_t segment) {
  return exchange(
      rank, ranks, segment, [&](int to) { return between(sent, to); },
      [&](int from) { return between(received, from); });
}

Schedule direct_allgather(int rank, int ranks, const std::vector<size_t>& begins, size_t segment) {
  return exchange(
      rank, ranks, segment, [&](int) { return between(begins, rank); },
      [&](int from) { return between(begins, from); });
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
