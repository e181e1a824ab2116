// Who sends which part of a buffer to whom, and when: the algorithms between hosts as plain data, built before anything moves,
// so that they can be checked without moving anything.
//
// Nomenclature. A buffer of n ranks is cut into n *shards*; a shard travels in *segments*, so that a rank can reduce or pass on
// one segment while the next is on the wire. All positions and lengths are in elements.
#pragma once

#include <cstddef>
#include <vector>

namespace horovodish {

struct Send {
  int peer;
  size_t begin, count;
  size_t after;  // may start once this many of the schedule's receives are done
};

struct Receive {
  enum class Then {
    store,          // overwrite the range
    reduce,         // range = received op range
    reduce_finish,  // as reduce, and apply the final scale: the shard is complete
  };
  int peer;
  size_t begin, count;
  size_t after;  // may be posted once this many of the schedule's sends are done, because it overwrites what they send
  Then then;
};

// Sends start, and receives are posted, in order; between two ranks they match in order.
struct Schedule {
  std::vector<Send> sends;
  std::vector<Receive> receives;
};

// Reduce-scatter and all-gather round a ring: 2 (n - 1) steps, 2 (n - 1) / n of the buffer sent per rank, which no algorithm
// undercuts. Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
Schedule ring_allreduce(int rank, int ranks, size_t count, size_t segment);

// Every rank sends its own block to every other: one step. `begins` has the first element of every rank's block and the end.
Schedule direct_allgather(int rank, int ranks, const std::vector<size_t>& begins, size_t segment);

// From the root down a tree in which a rank passes a segment on as soon as it has it. Short buffers take a binomial tree,
// log2(n) steps; long ones a chain, in which the root sends the buffer once.
Schedule tree_broadcast(int rank, int ranks, int root, size_t count, size_t segment);

}  // namespace horovodish
