// The plane of the ranks of one host: they read each other's memory.
//
// Nomenclature. The operations of the plane form one *stream*, cut into *chunks* that stay in the cache and numbered
// through all operations. Every rank has `slots` slots of shared memory for chunks; chunk k uses slot k % slots. A
// chunk passes up to four stages on each rank, and a counter per stage and rank tells the peers how far it is:
//     publish   copy this rank's part into its slot
//     combine   read the peers' slots: reduce this rank's *shard* of the chunk and put the result into the own slot,
//     or,
//               where there is nothing to share out, take the whole result
//     exchange  with several hosts only: combine the shard with those of the other hosts, in the slot, over MPI
//     collect   copy the other ranks' shards out of their slots
// A slot is published anew once every rank has collected its last chunk. All stages of different chunks overlap, so
// while one rank reduces chunk k its peer may already publish k + 1, also when that belongs to the next operation.
//
// Per element and rank, an allreduce of n ranks in place reads the tensor once and writes it once in main memory; the
// copies through the slots hit the cache. Contributions are always added in rank order, whatever the chunk or shard, so
// results do not depend on how tensors are fused.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "memory/arena.h"
#include "planes/mpi/schedule_run.h"
#include "planes/plane.h"
#include "planes/shards.h"

namespace horovodish {

// The other hosts, as far as the stream needs to know them.
struct Across {
  const abi::Mpi& mpi;
  std::vector<std::vector<int>> hosts;  // ranks of the process set by host
  size_t host;  // this one
  MpiTags tags;
  size_t segment_bytes;
  HostShards shards{hosts, MpiTags::kExchanges};

  // The ring of one rank per host for a shard of chunk `sequence`; `choose(host)` is its place among the ranks of that
  // host.
  MpiEnvironment ring(uint64_t sequence, size_t shard, const std::function<size_t(size_t host)>& choose) const;
};

// One operation as a sequence of chunks.
class StreamTask {
 public:
  // The slots of one chunk by rank of the plane.
  using Slots = std::vector<std::byte*>;

  virtual ~StreamTask() = default;
  // Chunks, as far as they are known: an allgather learns its length from its first chunk.
  virtual uint64_t chunks() const = 0;
  virtual bool all_chunks_known() const { return true; }
  virtual bool has_collect() const { return false; }
  virtual void publish(uint64_t chunk, std::byte* slot) = 0;
  virtual void combine(uint64_t chunk, const Slots& slots) = 0;
  // What this rank has to do over MPI before others may collect the chunk; `sequence` is the chunk's number in the
  // stream.
  virtual std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t, uint64_t /*sequence*/, const Slots&) { return {}; }
  virtual void collect(uint64_t, const Slots&) {}
};

class SharedMemoryPlane : public Plane {
 public:
  // `local`: the plane's ranks as local ranks of the arena; `own`: this rank's index among them.
  // `across`: none when all ranks are on this host.
  SharedMemoryPlane(Arena& arena, size_t region, const std::vector<size_t>& local, size_t own, size_t chunk_bytes,
                    std::optional<Across> across, OnComplete on_complete);
  ~SharedMemoryPlane() override;

  void start(std::shared_ptr<Operation> operation) override;
  Progress advance() override;
  bool needs_polling() const override { return !exchanges_.empty(); }

 private:
  struct Exchange {
    uint64_t sequence;
    const Operation* operation;  // in items_ for as long as this
    std::vector<std::unique_ptr<MpiTask>> tasks;
  };
  struct Item {
    std::shared_ptr<Operation> operation;
    std::vector<std::unique_ptr<StreamTask>> tasks;  // one per dtype of an allreduce, otherwise one
  };
  // Where a stage stands: a task of an item, and a chunk of that task.
  struct Cursor {
    uint64_t item = 0;  // counted from the first operation ever started
    size_t task = 0;
    uint64_t chunk = 0;
    uint64_t sequence = 0;  // chunks of the stream before this one
  };

  StreamTask* current(Cursor& cursor);
  const Operation& operation_at(const Cursor& cursor) const { return *items_[cursor.item - first_item_].operation; }
  void step(Cursor& cursor);
  bool publish_one();
  bool combine_one();
  bool exchange_some();
  bool collect_one();
  void pop_finished();
  bool reached(std::vector<uint64_t>& known, std::atomic<uint64_t> StreamCounters::* counter, uint64_t sequence);
  void announce(std::atomic<uint64_t> StreamCounters::* counter, uint64_t sequence);
  const StreamTask::Slots& slots_of(uint64_t sequence) const { return slots_[sequence % slots_.size()]; }

  Arena& arena_;
  const size_t own_, chunk_bytes_, slot_bytes_;
  const std::optional<Across> across_;
  std::vector<StreamCounters*> counters_;  // by rank of the plane
  std::vector<Doorbell*> peers_;
  OnComplete on_complete_;
  std::vector<StreamTask::Slots> slots_;  // by slot index
  std::deque<Item> items_;
  std::deque<Exchange> exchanges_;  // of chunks that are combined and not yet announced, in order
  uint64_t first_item_ = 0;  // number of items_.front()
  bool follows_ = false;  // the current step comes right after another one
  Cursor publish_, combine_, collect_;
  std::vector<uint64_t> known_published_, known_reduced_, known_released_;  // last values seen, by rank
};

}  // namespace horovodish
