// The plane of tensors in host memory: on one host, on several, or alone.
//
// Nomenclature. The operations of the plane form one *stream*, cut into *chunks* that stay in the cache and numbered
// through all operations. Every rank has `slots` slots of shared memory for chunks; chunk k uses slot k % slots. A
// chunk passes up to four stages on each rank, and a counter per stage and rank tells the peers how far it is:
//     publish   copy this rank's part into its slot
//     combine   read the peers' slots: reduce this rank's *shard* of the chunk and put the result into the own slot,
//               or, where there is nothing to share out, take the whole result
//     exchange  with several hosts only: send what is in the slot to the other hosts, and combine it with theirs, over MPI
//     collect   copy what the other ranks have for this one out of their slots
// A slot is published anew once every rank has collected its last chunk. All stages of different chunks overlap, so
// while one rank reduces chunk k its peer may already publish k + 1, also when that belongs to the next operation.
//
// If no host has several ranks, nobody else looks into a slot. A chunk is then a whole operation in memory of its own,
// or the tensor itself if there is only one.
//
// Per element and rank, an allreduce of n ranks in place reads the tensor once and writes it once in main memory; the
// copies through the slots hit the cache. Contributions are always added in rank order, whatever the chunk or shard, so
// results do not depend on how tensors are fused.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "memory/arena.h"
#include "planes/plane.h"
#include "planes/residuals.h"
#include "planes/stream/codec_trial.h"
#include "planes/stream/world.h"

namespace horovodish {

// One operation as a sequence of chunks.
class StreamTask {
 public:
  // The slots of one chunk by rank of this host; null where there are none.
  using Slots = std::vector<std::byte*>;
  // The stages that its chunks pass besides the exchange.
  struct Stages {
    bool publish, combine, collect;
  };

  virtual ~StreamTask() = default;
  virtual Stages stages() const = 0;
  // The number of known chunks: an allgather learns its length from its first chunk.
  virtual uint64_t chunks() const = 0;
  virtual bool all_chunks_known() const { return true; }
  virtual void publish(uint64_t, std::byte*) {}
  virtual void combine(uint64_t, const Slots&) {}
  // This rank's work over MPI before other ranks may collect the chunk. `sequence`: the chunk's number in the stream.
  virtual std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t, uint64_t /*sequence*/, const Slots&) { return {}; }
  virtual void collect(uint64_t, const Slots&) {}
};

class StreamPlane : public Plane {
 public:
  // `arena` may be null if no host has several ranks. `arena`, `config` and `options` outlive the plane.
  StreamPlane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena, OnEnd on_end);
  ~StreamPlane() override;

  void start(std::shared_ptr<Operation> operation) override;
  bool advance() override;
  // Also before a transfer begins: the decision on an operation comes from another host, which rings no doorbell
  // either.
  bool needs_polling() const override { return world_.several_hosts(); }
  std::vector<Residuals::Report> code_reports() const override { return residuals_.reports(); }

 private:
  struct Item {
    std::shared_ptr<Operation> operation;
    std::vector<std::shared_ptr<StreamTask>> tasks;  // one per dtype of an allreduce, otherwise one
  };
  struct Exchange {
    uint64_t sequence;
    std::shared_ptr<Operation> operation;
    std::shared_ptr<StreamTask> task;
    std::vector<std::unique_ptr<MpiTask>> transfers;
  };
  // The position of a stage: a task of an item, and a chunk of that task.
  struct Cursor {
    uint64_t item = 0;  // counted from the first operation ever started
    size_t task = 0;
    uint64_t chunk = 0;
    uint64_t sequence = 0;  // chunks of the stream before this one
  };

  void begin(std::shared_ptr<Operation> operation);
  void continue_trial();
  bool is_first_rank() const { return world_.host == 0 && world_.own == 0; }
  const std::shared_ptr<StreamTask>* current(Cursor& cursor);
  const std::shared_ptr<Operation>& operation_at(const Cursor& cursor) const {
    return items_[cursor.item - first_item_].operation;
  }
  void step(Cursor& cursor);
  bool publish_one();
  bool combine_one();
  bool exchange_some();
  bool collect_one();
  void pop_finished();
  bool reached(std::vector<uint64_t>& known, std::atomic<uint64_t> StreamCounters::* counter, uint64_t sequence);
  void announce(std::atomic<uint64_t> StreamCounters::* counter, uint64_t sequence);
  const StreamTask::Slots& slots_of(uint64_t sequence) const { return slots_[sequence % slots_.size()]; }

  const StreamWorld world_;  // without the sizes of an operation
  const EngineOptions& options_;
  Arena* const arena_;  // null where no host has several ranks
  StreamCounters own_counters_{};  // used if nobody else looks at them
  std::vector<StreamCounters*> counters_;  // by rank of this host
  std::vector<Doorbell*> peers_;
  const OnEnd on_end_;
  Residuals residuals_;
  std::unique_ptr<CodecTrial> trial_;  // under way, for the first of waiting_
  std::vector<std::shared_ptr<Operation>> waiting_;  // in order, until the trial is over
  bool said_one_host_ = false;
  std::vector<StreamTask::Slots> slots_;  // by slot index
  std::deque<Item> items_;
  std::deque<Exchange> exchanges_;  // combined chunks that are not announced yet, in order
  uint64_t first_item_ = 0;  // number of items_.front()
  bool follows_ = false;  // the current step comes right after another one
  Cursor publish_, combine_, collect_;
  std::vector<uint64_t> known_published_, known_reduced_, known_released_;  // last values seen, by rank
};

}  // namespace horovodish
