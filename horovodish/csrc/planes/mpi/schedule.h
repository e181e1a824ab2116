// Which rank sends which part of a buffer to which rank, and when: the algorithms between hosts as plain data, built
// before anything moves, so that tests can check them without moving anything.
//
// Nomenclature. A buffer of n ranks is cut into n *shards*; a shard travels in *segments*, so that a rank can reduce or
// pass on one segment while the next is on the wire. All positions and lengths are in elements.
#pragma once

#include <cstddef>
#include <vector>

#include "operation/range.h"

namespace horovodish {

struct Send {
  int peer;
  size_t begin, count;
  size_t after;  // may start once this many of the schedule's receives are done
};

struct Receive {
  enum class Then {
    store,  // overwrite the range
    reduce,  // range = received op range
    reduce_finish,  // as reduce, and apply the final scale: the shard is complete
  };
  int peer;
  size_t begin, count;
  size_t after;  // may write once this many of the schedule's sends are done, because these read the range
  Then then;
};

// Sends start, and receives are posted, in order. Between two ranks they match in order.
struct Schedule {
  std::vector<Send> sends;
  std::vector<Receive> receives;
};

// Reduce-scatter round a ring: n - 1 steps, (n - 1) / n of the buffer sent per rank, which no algorithm undercuts.
// Rank i ends up with shard i.
Schedule ring_reduce_scatter(int rank, int ranks, const std::vector<Range>& shards, size_t segment);

// Reduce-scatter, then all-gather of the shards, round the same ring: 2 (n - 1) steps. Patarasuk and Yuan, "Bandwidth
// optimal all-reduce algorithms for clusters of workstations", 2009.
Schedule ring_allreduce(int rank, int ranks, size_t count, size_t segment);

// Reduce-scatter by halves, then all-gather of the shards by doubling: 2 log2(n) steps. If n is no power of two, the
// ranks beyond the largest power first give their values to another rank and later get the result from it: two more
// steps. Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
Schedule halving_allreduce(int rank, int ranks, size_t count, size_t segment);

// Every rank owns a shard. It receives the shard's values from all other ranks, adds them up, and sends the result to all
// of them: two steps and 2 (n - 1) messages, of as many bytes as in a ring, whatever n is. The first step is the pairwise
// exchange that MPICH takes for reduce-scatters from 512 KiB on.
Schedule two_step_allreduce(int rank, int ranks, size_t count, size_t segment);

// All-reduce of two ranks in one step: each sends the other one everything. That is as much as in a ring.
Schedule pair_allreduce(int rank, size_t count, size_t segment);

enum class AllreduceAlgorithm { direct, two_step, halving, ring };

// The fastest all-reduce between hosts. `direct` sends everything to every rank in one step. The choice depends on the
// arguments alone, so all ranks make the same one, and a repeated run gets the same bits. MPICH and Open MPI have fixed
// limits, too: they change the algorithm above 2048 and at 10000 bytes.
AllreduceAlgorithm fastest_allreduce(int ranks, size_t bytes);

// Every rank sends a block to every other: one step. sent[i] is for rank i, received[i] comes from rank i.
Schedule direct_exchange(int rank, int ranks, const std::vector<Range>& sent, const std::vector<Range>& received,
                         size_t segment);

// A tree from the root. A rank passes a segment on as soon as it has it. A short buffer takes a binomial tree, log2(n)
// steps; a long one takes a chain, and the root sends it once.
Schedule tree_broadcast(int rank, int ranks, int root, size_t count, size_t segment);

}  // namespace horovodish
