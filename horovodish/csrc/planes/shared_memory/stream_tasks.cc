#include "planes/shared_memory/stream_tasks.h"

#include <algorithm>

#include "arithmetic/copy_bytes.h"
#include "planes/adasum_tasks.h"
#include "planes/fusion.h"
#include "planes/mpi/mpi_tasks.h"
#include "planes/rows.h"
#include "planes/shards.h"

namespace horovodish {

namespace {

// An allreduce of at most this many bytes is reduced by every rank for itself: below, the second wait for the peers costs
// more than the arithmetic that it saves.
constexpr size_t kUnsharedBytes = 16 << 10;

size_t ranks_of(const Across& across) {
  size_t ranks = 0;
  for (const auto& host : across.hosts) ranks += host.size();
  return ranks;
}

// Allreduce and reducescatter. A chunk is cut into shards, one for each rank of this host; the owner of a shard reduces it
// straight into the targets. With several hosts there are as many shards as the largest host has ranks, see HostShards, and their owners
// reduce them in the slot, where they are exchanged with the owners on the other hosts.
class ReduceTask : public StreamTask {
 public:
  // `unshared`: every rank reduces for itself what it wants.
  ReduceTask(const Operation& operation, Concatenation concatenation, const StreamWorld& world, bool unshared)
      : concatenation_(std::move(concatenation)),
        op_(operation.request->op),
        scaling_(operation.scaling()),
        staged_(world.across == nullptr ? StagedScaling{}
                                        : in_stages(concatenation_.dtype(), op_, scaling_, ranks_of(*world.across))),
        packing_scale_(operation.packing_scale()),
        world_(world),
        item_(concatenation_.item_bytes()),
        chunk_(world.chunk_bytes / item_),
        unshared_(unshared),
        shards_(unshared                  ? 1
                : world.across != nullptr ? world.across->shards.count()
                                          : world.ranks),
        sources_(world.ranks) {}

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }
  bool has_collect() const override { return world_.across != nullptr || !unshared_; }

  void publish(uint64_t chunk, std::byte* slot) override {
    const Range range = whole(chunk);
    for (size_t index = 0; index < shards_; ++index) {
      const Range part = shard(range, index);
      if (is_own(index) && reduces_in_place()) continue;
      concatenation_.pack(part, op_, slot + (part.begin - range.begin) * item_, packing_scale_);
    }
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    const Range range = whole(chunk);
    for (size_t index = 0; index < shards_; ++index) {
      if (!has_collect() || is_own(index)) combine_shard(range, shard(range, index), slots);
    }
  }

  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t chunk, uint64_t sequence, const Slots& slots) override {
    std::vector<std::unique_ptr<MpiTask>> tasks;
    const Range range = whole(chunk);
    const Across& across = *world_.across;
    for (size_t index = 0; index < shards_; ++index) {
      const Range part = shard(range, index);
      if (!is_own(index) || part.count == 0) continue;
      const auto owner = [&](size_t host) { return index % across.hosts[host].size(); };
      tasks.push_back(make_allreduce(across.ring(sequence, index, owner), concatenation_.dtype(), op_, staged_.last,
                                     slots[world_.own] + (part.begin - range.begin) * item_, part.count));
    }
    return tasks;
  }

  void collect(uint64_t chunk, const Slots& slots) override {
    const Range range = whole(chunk);
    for (size_t index = 0; index < shards_; ++index) {
      if (is_own(index) && world_.across == nullptr) continue;
      const Range part = shard(range, index);
      concatenation_.unpack(part, slots[index % world_.ranks] + (part.begin - range.begin) * item_);
    }
  }

 private:
  Range whole(uint64_t chunk) const { return piece_of(concatenation_.count(), chunk_, chunk); }
  Range shard(const Range& range, size_t index) const { return shard_of(range, shards_, item_, index); }
  bool is_own(size_t index) const { return index % world_.ranks == world_.own; }
  // The own shard is reduced from where it lies, unless it takes the identity or a scaled value from the slot.
  bool reduces_in_place() const {
    return has_collect() && packing_scale_ == 1.0 && concatenation_.tensors().front().source != nullptr;
  }

  void combine_shard(const Range& range, const Range& part, const Slots& slots) {
    const bool exchanged = world_.across != nullptr;
    const Scaling& scaling = exchanged ? staged_.first : scaling_;
    concatenation_.for_each_piece(
        part, [&](const Concatenation::Tensor& tensor, size_t first, size_t length, size_t position) {
          // Nobody wants the result here, and the slot is still being read when each rank reduces for itself.
          if (!has_collect() && tensor.target == nullptr) return;
          const size_t offset = (part.begin - range.begin + position) * item_;
          for (size_t rank = 0; rank < world_.ranks; ++rank) sources_[rank] = slots[rank] + offset;
          if (reduces_in_place()) sources_[world_.own] = tensor.source + first * item_;
          std::byte* const slot = slots[world_.own] + offset;
          std::byte* const target = exchanged || tensor.target == nullptr ? slot : tensor.target + first * item_;
          reduce(concatenation_.dtype(), op_, target, sources_.data(), world_.ranks, length, scaling);
          if (has_collect() && target != slot) copy_bytes(slot, target, length * item_);
        });
  }

  const Concatenation concatenation_;
  const ReduceOp op_;
  const Scaling scaling_;
  const StagedScaling staged_;  // with several hosts
  const double packing_scale_;
  const StreamWorld world_;
  const size_t item_, chunk_;
  const bool unshared_;
  const size_t shards_;
  std::vector<const void*> sources_;
};

// The root publishes, everybody takes. With several hosts the root sends a chunk on to one rank of every other host, in
// whose slot its neighbours find it.
class BroadcastTask : public StreamTask {
 public:
  BroadcastTask(const Operation& operation, const StreamWorld& world)
      : concatenation_(Concatenation::as_bytes(operation)),
        world_(world),
        source_(static_cast<size_t>(operation.root)) {
    if (world.across == nullptr) {
      is_root_ = world.own == source_;
      return;
    }
    const auto& hosts = world.across->hosts;
    for (size_t host = 0; host < hosts.size(); ++host) {
      const auto found = std::find(hosts[host].begin(), hosts[host].end(), operation.root);
      entries_.push_back(found == hosts[host].end() ? 0 : static_cast<size_t>(found - hosts[host].begin()));
      if (found != hosts[host].end()) root_host_ = host;
    }
    source_ = entries_[world.across->host];
    is_root_ = world.own == source_ && world.across->host == root_host_;
  }

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), world_.chunk_bytes); }
  bool has_collect() const override { return world_.across != nullptr; }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (is_root_) concatenation_.pack(whole(chunk), ReduceOp::sum, slot);
  }
  void combine(uint64_t chunk, const Slots& slots) override {
    if (!has_collect()) take(chunk, slots);
  }
  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t chunk, uint64_t sequence, const Slots& slots) override {
    std::vector<std::unique_ptr<MpiTask>> tasks;
    if (world_.own != source_) return tasks;
    const auto entry = [&](size_t host) { return entries_[host]; };
    tasks.push_back(make_broadcast(world_.across->ring(sequence, 0, entry), static_cast<int>(root_host_),
                                   slots[world_.own], whole(chunk).count));
    return tasks;
  }
  void collect(uint64_t chunk, const Slots& slots) override { take(chunk, slots); }

 private:
  Range whole(uint64_t chunk) const { return piece_of(concatenation_.count(), world_.chunk_bytes, chunk); }
  void take(uint64_t chunk, const Slots& slots) {
    if (!is_root_) return concatenation_.unpack(whole(chunk), slots[source_]);
    concatenation_.for_each_piece(whole(chunk),
                                  [](const Concatenation::Tensor& tensor, size_t first, size_t count, size_t) {
                                    if (tensor.target != nullptr && tensor.target != tensor.source) {
                                      copy_bytes(tensor.target + first, tensor.source + first, count);
                                    }
                                  });
  }

  const Concatenation concatenation_;
  const StreamWorld world_;
  size_t source_;                // the rank of this host in whose slot the data appears
  std::vector<size_t> entries_;  // by host: that rank
  size_t root_host_ = 0;
  bool is_root_ = false;
};

// Allgather and alltoall. The first chunks carry every rank's line of the table; the chunks after them carry the data of
// every rank side by side, and each rank copies out what is for it.
class RowsTask : public StreamTask {
 public:
  RowsTask(std::shared_ptr<Operation> operation, size_t own, size_t ranks, size_t chunk_bytes)
      : operation_(std::move(operation)),
        own_(own),
        ranks_(ranks),
        chunk_(chunk_bytes),
        table_(*operation_, own, ranks),
        table_chunks_(ceil_divide(table_.line_bytes(), chunk_)) {}

  uint64_t chunks() const override { return table_chunks_ + data_chunks_; }
  bool all_chunks_known() const override { return tables_read_ == table_chunks_; }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (chunk < table_chunks_) {
      const auto [begin, bytes] = table_part(chunk);
      copy_bytes(slot, line(own_) + begin, bytes);
      return;
    }
    contributions_[own_].pack(data_part(chunk, own_), ReduceOp::sum, slot);
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    for (size_t rank = 0; rank < ranks_; ++rank) {
      if (chunk < table_chunks_) {
        const auto [begin, bytes] = table_part(chunk);
        copy_bytes(line(rank) + begin, slots[rank], bytes);
        continue;
      }
      contributions_[rank].unpack(data_part(chunk, rank), slots[rank]);
    }
    if (chunk < table_chunks_ && ++tables_read_ == table_chunks_) lay_out();
  }

 private:
  std::byte* line(size_t rank) { return reinterpret_cast<std::byte*>(table_.line(rank)); }
  Range table_part(uint64_t chunk) const { return piece_of(table_.line_bytes(), chunk_, chunk); }
  Range data_part(uint64_t chunk, size_t rank) const {
    return piece_of(contributions_[rank].count(), chunk_, chunk - table_chunks_);
  }

  void lay_out() {
    contributions_.assign(ranks_, Concatenation(DType::uint8));
    for (size_t i = 0; i < operation_->buffers.size(); ++i) {
      std::byte* target = allocate_rows(*operation_, i, table_.incoming(i)).data.get();
      for (size_t rank = 0; rank < ranks_; ++rank) target = append_rows(rank, i, target);
    }
    for (const Concatenation& contribution : contributions_) {
      data_chunks_ = std::max(data_chunks_, ceil_divide(contribution.count(), chunk_));
    }
  }

  // What `rank` contributes of member `i`: its rows are for everybody, or one run of them for each rank.
  std::byte* append_rows(size_t rank, size_t i, std::byte* target) {
    const bool alltoall = operation_->request->kind == Kind::alltoall;
    const size_t row = row_bytes(operation_->request->members[i]);
    const std::byte* source = rank == own_ ? operation_->buffers[i].source : target;
    const size_t runs = alltoall ? ranks_ : 1;
    for (size_t run = 0; run < runs; ++run) {
      const size_t bytes = row * static_cast<size_t>(table_.between(i, rank, run));
      const bool mine = !alltoall || run == own_;
      contributions_[rank].append(source, mine ? target : nullptr, bytes);
      if (rank == own_) source += bytes;
      if (mine) target += bytes;
    }
    return target;
  }

  const std::shared_ptr<Operation> operation_;
  const size_t own_, ranks_, chunk_;
  RowTable table_;
  const uint64_t table_chunks_;
  uint64_t tables_read_ = 0, data_chunks_ = 0;
  std::vector<Concatenation> contributions_;  // by rank
};

}  // namespace

std::vector<std::unique_ptr<StreamTask>> make_stream_tasks(const std::shared_ptr<Operation>& operation,
                                                           const StreamWorld& world) {
  const auto& [own, ranks, chunk_bytes, across] = world;
  std::vector<std::unique_ptr<StreamTask>> tasks;
  switch (operation->request->kind) {
    case Kind::allreduce:
      for (Concatenation& concatenation : Concatenation::by_dtype(*operation)) {
        if (operation->request->op == ReduceOp::adasum) {
          tasks.push_back(make_adasum_stream(*operation, std::move(concatenation), own, ranks, chunk_bytes));
        } else {
          const bool small = concatenation.count() * concatenation.item_bytes() <= kUnsharedBytes;
          tasks.push_back(std::make_unique<ReduceTask>(*operation, std::move(concatenation), world, small));
        }
      }
      break;
    case Kind::reducescatter:
      for (ByRank& values : by_rank(*operation, own, ranks)) {
        tasks.push_back(std::make_unique<ReduceTask>(*operation, std::move(values.concatenation), world, true));
      }
      break;
    case Kind::allgather:
    case Kind::alltoall:
      tasks.push_back(std::make_unique<RowsTask>(operation, own, ranks, chunk_bytes));
      break;
    case Kind::broadcast:
      tasks.push_back(std::make_unique<BroadcastTask>(*operation, world));
      break;
    case Kind::barrier:
    case Kind::join:
      break;  // that every rank has submitted it is all there is to do
  }
  return tasks;
}

}  // namespace horovodish
