#include "planes/mpi/schedule.h"

#include <algorithm>
#include <bit>

#include "planes/shards.h"

namespace horovodish {

namespace {

// A buffer of more segments than this goes down a chain: the pipeline is then long enough to hide the chain's depth.
constexpr size_t kChainSegments = 8;

// The cost of a step until its first byte arrives, and of a message for its sender, as bytes that could be sent in that
// time: 20 us and 2 us of a link that a rank fills with 0.6 GB/s, measured over TCP.
constexpr double kStepBytes = 12 << 10, kMessageBytes = 1200;

// Longer pieces than this go round the ring, where each rank has two neighbours. A ring has more steps, but while one
// operation waits for a step, the next ones fill a link of up to 50 Gbit/s.
constexpr size_t kLongestPiece = 64 << 10;

std::vector<Range> segments_of(Range range, size_t segment) {
  std::vector<Range> result;
  for (size_t done = 0; done < range.count; done += segment) {
    result.push_back({range.begin + done, std::min(segment, range.count - done)});
  }
  return result;
}

void add_sends(Schedule& schedule, int peer, Range part, size_t segment, size_t after) {
  for (const Range& range : segments_of(part, segment)) {
    schedule.sends.push_back({peer, range.begin, range.count, after});
  }
}

void add_receives(Schedule& schedule, int peer, Range part, size_t segment, size_t after, Receive::Then then) {
  for (const Range& range : segments_of(part, segment)) {
    schedule.receives.push_back({peer, range.begin, range.count, after, then});
  }
}

// `steps` steps of the ring. Each step sends the data that the step before received. The shards rotate so that rank i
// finishes shard i after ranks - 1 steps. Later steps pass finished shards round.
Schedule ring(int rank, int ranks, const std::vector<Range>& shards, size_t segment, int steps) {
  Schedule schedule;
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  const auto shard_at = [&](int index) { return static_cast<size_t>((index + 3 * ranks) % ranks); };
  std::vector<size_t> sent_before(static_cast<size_t>(ranks));  // by shard: number of sends before its last send
  size_t received_before = 0;
  for (int step = 0; step < steps; ++step) {
    const size_t sent = shard_at(rank - step - 1), received = shard_at(rank - step - 2);
    const bool gather = step >= ranks - 1;
    const size_t received_now = schedule.receives.size();
    sent_before[sent] = schedule.sends.size();
    size_t dependency = received_before;
    for (const Range& range : segments_of(shards[sent], segment)) {
      schedule.sends.push_back({next, range.begin, range.count, step == 0 ? 0 : ++dependency});
    }
    size_t overwritten = sent_before[received];
    for (const Range& range : segments_of(shards[received], segment)) {
      const auto then = gather              ? Receive::Then::store
                        : step == ranks - 2 ? Receive::Then::reduce_finish
                                            : Receive::Then::reduce;
      schedule.receives.push_back({previous, range.begin, range.count, gather ? ++overwritten : 0, then});
    }
    received_before = received_now;
  }
  return schedule;
}

}  // namespace

Schedule ring_reduce_scatter(int rank, int ranks, const std::vector<Range>& shards, size_t segment) {
  return ring(rank, ranks, shards, segment, ranks - 1);
}

Schedule ring_allreduce(int rank, int ranks, size_t count, size_t segment) {
  const auto n = static_cast<size_t>(ranks);
  std::vector<Range> shards;
  for (size_t i = 0; i < n; ++i) shards.push_back(elements_of(count, i, n));
  return ring(rank, ranks, shards, segment, 2 * (ranks - 1));
}

Schedule halving_allreduce(int rank, int ranks, size_t count, size_t segment) {
  using Then = Receive::Then;
  Schedule schedule;
  const int halvers = static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks)));
  const Range whole{0, count};
  if (rank >= halvers) {
    add_sends(schedule, rank - halvers, whole, segment, 0);
    add_receives(schedule, rank - halvers, whole, segment, schedule.sends.size(), Then::store);
    return schedule;
  }
  const bool helps = rank + halvers < ranks;
  if (helps) add_receives(schedule, rank + halvers, whole, segment, 0, Then::reduce);
  struct Step {
    int peer;
    Range kept, given;
    size_t sends;  // up to and including this step
  };
  std::vector<Step> steps;
  Range mine = whole;
  for (int distance = halvers / 2; distance > 0; distance /= 2) {
    const Range low{mine.begin, mine.count / 2}, high{mine.begin + low.count, mine.count - low.count};
    const bool keeps_low = (rank & distance) == 0;
    Step step{rank ^ distance, keeps_low ? low : high, keeps_low ? high : low, 0};
    add_sends(schedule, step.peer, step.given, segment, schedule.receives.size());
    add_receives(schedule, step.peer, step.kept, segment, 0, distance == 1 ? Then::reduce_finish : Then::reduce);
    step.sends = schedule.sends.size();
    steps.push_back(step);
    mine = step.kept;
  }
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    add_sends(schedule, step->peer, step->kept, segment, schedule.receives.size());
    add_receives(schedule, step->peer, step->given, segment, step->sends, Then::store);
  }
  if (helps) add_sends(schedule, rank + halvers, whole, segment, schedule.receives.size());
  return schedule;
}

// Sends begin with the next rank, and receives with the one before, so that no rank is the first one of all the others.
Schedule two_step_allreduce(int rank, int ranks, size_t count, size_t segment) {
  using Then = Receive::Then;
  Schedule schedule;
  const auto shard_of_rank = [&](int owner) {
    return elements_of(count, static_cast<size_t>(owner), static_cast<size_t>(ranks));
  };
  std::vector<size_t> given(static_cast<size_t>(ranks));  // by shard: number of sends up to the last one of its values
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
    add_sends(schedule, to, shard_of_rank(to), segment, 0);
    given[static_cast<size_t>(to)] = schedule.sends.size();
    const auto then = step == ranks - 1 ? Then::reduce_finish : Then::reduce;
    add_receives(schedule, from, shard_of_rank(rank), segment, 0, then);
  }
  const size_t reduced = schedule.receives.size();
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
    add_sends(schedule, to, shard_of_rank(rank), segment, reduced);
    add_receives(schedule, from, shard_of_rank(from), segment, given[static_cast<size_t>(from)], Then::store);
  }
  return schedule;
}

AllreduceAlgorithm fastest_allreduce(int ranks, size_t bytes) {
  const auto cost = [&](int steps, int messages, double sent) {
    return steps * kStepBytes + messages * kMessageBytes + sent * static_cast<double>(bytes);
  };
  const double n = ranks;
  const int halvers = static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks)));
  const int halvings = std::countr_zero(static_cast<unsigned>(halvers));
  const int extra = halvers == ranks ? 0 : 2;
  const int halving_steps = 2 * halvings + extra, ring_steps = 2 * (ranks - 1);
  const double direct = cost(1, ranks - 1, n - 1);
  const double halving = cost(halving_steps, halving_steps, 2.0 * (halvers - 1) / halvers + extra);
  const double ring = cost(ring_steps, ring_steps, 2 * (n - 1) / n);
  const bool is_long = bytes > kLongestPiece * static_cast<size_t>(ranks);
  // A third step, because each owner waits for the slowest of all senders. Four messages for each piece: with these
  // figures no number of hosts up to 300 is predicted to lose at 1, 10 or 100 Gbit/s, whether operations follow each other
  // or not.
  const double two_step = is_long ? ring : cost(3, 4 * ring_steps, 2 * (n - 1) / n);
  if (direct <= std::min({halving, ring, two_step})) return AllreduceAlgorithm::direct;
  if (two_step < std::min(halving, ring)) return AllreduceAlgorithm::two_step;
  return halving < ring ? AllreduceAlgorithm::halving : AllreduceAlgorithm::ring;
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

// Begins with the next rank, so that no rank is the first one of all the others.
Schedule direct_exchange(int rank, int ranks, const std::vector<Range>& sent, const std::vector<Range>& received,
                         size_t segment) {
  Schedule schedule;
  for (int step = 1; step < ranks; ++step) {
    const int to = (rank + step) % ranks, from = (rank + ranks - step) % ranks;
    add_sends(schedule, to, sent[static_cast<size_t>(to)], segment, 0);
    add_receives(schedule, from, received[static_cast<size_t>(from)], segment, 0, Receive::Then::store);
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
    // The parent of a position lacks its lowest set bit. The children add one lower bit each, the largest subtree
    // first.
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
