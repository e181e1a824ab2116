#include "planes/shared_memory/stream_tasks.h"

#include <algorithm>
#include <cstring>

#include "planes/adasum_tasks.h"
#include "planes/fusion.h"
#include "planes/mpi/mpi_tasks.h"
#include "planes/shards.h"

namespace horovodish {

namespace {

// A chunk of at most this many bytes is reduced by every rank for itself: below, the second wait for the peers costs
// more than the arithmetic that it saves.
constexpr size_t kUnsharedBytes = 16 << 10;

// A chunk is cut into shards, one for each rank of this host; the owner of a shard reduces it straight into the
// targets. With several hosts there are as many shards as the largest host has ranks, see HostShards, and their owners
// reduce them in the slot, where they are exchanged with the owners on the other hosts.
class AllreduceTask : public StreamTask {
 public:
  AllreduceTask(const Operation& operation, Concatenation concatenation, const StreamWorld& world)
      : concatenation_(std::move(concatenation)),
        op_(operation.request->op),
        scaling_(operation.scaling()),
        packing_scale_(operation.packing_scale()),
        world_(world),
        item_(concatenation_.item_bytes()),
        chunk_(world.chunk_bytes / item_),
        small_(concatenation_.count() * item_ <= kUnsharedBytes),
        shards_(small_                    ? 1
                : world.across != nullptr ? world.across->shards.count()
                                          : world.ranks),
        sources_(world.ranks) {}

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }
  // On one host every rank reduces a small chunk for itself.
  bool has_collect() const override { return world_.across != nullptr || !small_; }

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
      tasks.push_back(make_allreduce(across.ring(sequence, index, owner), concatenation_.dtype(), op_,
                                     {.postscale = scaling_.postscale, .divisor = scaling_.divisor},
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
  // The own shard is reduced from where it lies, unless it takes a neutral or a scaled value from the slot.
  bool reduces_in_place() const {
    return has_collect() && packing_scale_ == 1.0 && concatenation_.tensors().front().source != nullptr;
  }

  void combine_shard(const Range& range, const Range& part, const Slots& slots) {
    const bool exchanged = world_.across != nullptr;
    const Scaling scaling = exchanged ? Scaling{.prescale = scaling_.prescale} : scaling_;
    concatenation_.for_each_piece(
        part, [&](const Concatenation::Tensor& tensor, size_t first, size_t length, size_t position) {
          // A joined rank wants no result, and its slot is still being read when each rank reduces for itself.
          if (!has_collect() && tensor.target == nullptr) return;
          const size_t offset = (part.begin - range.begin + position) * item_;
          for (size_t rank = 0; rank < world_.ranks; ++rank) sources_[rank] = slots[rank] + offset;
          if (reduces_in_place()) sources_[world_.own] = tensor.source + first * item_;
          std::byte* const slot = slots[world_.own] + offset;
          std::byte* const target = exchanged || tensor.target == nullptr ? slot : tensor.target + first * item_;
          reduce(concatenation_.dtype(), op_, target, sources_.data(), world_.ranks, length, scaling);
          if (has_collect() && target != slot) std::memcpy(slot, target, length * item_);
        });
  }

  const Concatenation concatenation_;
  const ReduceOp op_;
  const Scaling scaling_;
  const double packing_scale_;
  const StreamWorld world_;
  const size_t item_, chunk_;
  const bool small_;
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
                                      std::memcpy(tensor.target + first, tensor.source + first, count);
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

// Every rank publishes everything and reduces its own rows straight into its output.
class ReducescatterTask : public StreamTask {
 public:
  ReducescatterTask(const Operation& operation, DType dtype, size_t own, size_t ranks, size_t chunk_bytes)
      : concatenation_(dtype),
        op_(operation.request->op),
        scaling_(operation.scaling()),
        packing_scale_(operation.packing_scale()),
        chunk_(chunk_bytes / bytes_of(dtype)) {
    const auto& members = operation.request->members;
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].dtype != dtype || members[i].count() == 0) continue;
      const auto row = static_cast<size_t>(members[i].count() / members[i].shape[0]);
      const Rows rows = rows_of(members[i].shape[0], own, ranks);
      own_.push_back({static_cast<size_t>(rows.begin) * row, static_cast<size_t>(rows.count) * row});
      concatenation_.append(operation.buffers[i].source, operation.buffers[i].target,
                            static_cast<size_t>(members[i].count()));
    }
  }

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }
  void publish(uint64_t chunk, std::byte* slot) override {
    concatenation_.pack(whole(chunk), op_, slot, packing_scale_);
  }
  void combine(uint64_t chunk, const Slots& slots) override {
    const size_t item = concatenation_.item_bytes();
    std::vector<const void*> sources(slots.size());
    concatenation_.for_each_piece(
        whole(chunk), [&](const Concatenation::Tensor& tensor, size_t first, size_t count, size_t position) {
          const Range own = own_[concatenation_.index_of(tensor)];
          const size_t from = std::max(first, own.begin), to = std::min(first + count, own.end());
          if (tensor.target == nullptr || from >= to) return;
          for (size_t rank = 0; rank < slots.size(); ++rank)
            sources[rank] = slots[rank] + (position + from - first) * item;
          reduce(concatenation_.dtype(), op_, tensor.target + (from - own.begin) * item, sources.data(), slots.size(),
                 to - from, scaling_);
        });
  }

 private:
  Range whole(uint64_t chunk) const { return piece_of(concatenation_.count(), chunk_, chunk); }

  Concatenation concatenation_;
  const ReduceOp op_;
  const Scaling scaling_;
  const double packing_scale_;
  const size_t chunk_;
  std::vector<Range> own_;  // by tensor: what this rank keeps of it
};

// Collectives whose lengths no rank knows beforehand. The first chunks carry every rank's table of row counts; the
// chunks after them carry the data of every rank side by side, and each rank copies out what is for it.
class RowsTask : public StreamTask {
 public:
  RowsTask(std::shared_ptr<Operation> operation, size_t own, size_t ranks, size_t chunk_bytes)
      : operation_(std::move(operation)), own_(own), chunk_(chunk_bytes), counts_(ranks) {
    for (const Buffer& buffer : operation_->buffers) {
      if (operation_->request->kind == Kind::alltoall) {
        table_.insert(table_.end(), buffer.splits.begin(), buffer.splits.end());
      } else {
        table_.push_back(buffer.first_dim);
      }
    }
    table_chunks_ = ceil_divide(table_.size() * sizeof(int64_t), chunk_);
    for (auto& counts : counts_) counts.resize(table_.size());
  }

  uint64_t chunks() const override { return table_chunks_ + data_chunks_; }
  bool all_chunks_known() const override { return tables_read_ == table_chunks_; }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (chunk < table_chunks_) {
      const auto [begin, bytes] = table_part(chunk);
      std::memcpy(slot, reinterpret_cast<const std::byte*>(table_.data()) + begin, bytes);
      return;
    }
    contributions_[own_].pack(data_part(chunk, own_), ReduceOp::sum, slot);
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    for (size_t rank = 0; rank < counts_.size(); ++rank) {
      if (chunk < table_chunks_) {
        const auto [begin, bytes] = table_part(chunk);
        std::memcpy(reinterpret_cast<std::byte*>(counts_[rank].data()) + begin, slots[rank], bytes);
        continue;
      }
      contributions_[rank].unpack(data_part(chunk, rank), slots[rank]);
    }
    if (chunk < table_chunks_ && ++tables_read_ == table_chunks_) lay_out();
  }

 private:
  Range table_part(uint64_t chunk) const { return piece_of(table_.size() * sizeof(int64_t), chunk_, chunk); }
  Range data_part(uint64_t chunk, size_t rank) const {
    return piece_of(contributions_[rank].count(), chunk_, chunk - table_chunks_);
  }

  void lay_out() {
    const size_t ranks = counts_.size();
    const bool alltoall = operation_->request->kind == Kind::alltoall;
    contributions_.assign(ranks, Concatenation(DType::uint8));
    for (size_t i = 0; i < operation_->buffers.size(); ++i) {
      std::vector<int64_t> rows(ranks);
      for (size_t rank = 0; rank < ranks; ++rank) rows[rank] = counts_[rank][alltoall ? i * ranks + own_ : i];
      std::byte* target = allocate_rows(*operation_, i, rows).data.get();
      for (size_t rank = 0; rank < ranks; ++rank) target = append_rows(rank, i, alltoall, target);
    }
    for (const Concatenation& contribution : contributions_) {
      data_chunks_ = std::max(data_chunks_, ceil_divide(contribution.count(), chunk_));
    }
  }

  // What `rank` contributes of member `i`: its rows are for everybody, or one run of them for each rank.
  std::byte* append_rows(size_t rank, size_t i, bool alltoall, std::byte* target) {
    const size_t row = row_bytes(operation_->request->members[i]);
    const std::byte* source = rank == own_ ? operation_->buffers[i].source : target;
    const size_t runs = alltoall ? counts_.size() : 1;
    for (size_t run = 0; run < runs; ++run) {
      const size_t bytes = row * static_cast<size_t>(counts_[rank][i * runs + run]);
      const bool mine = !alltoall || run == own_;
      contributions_[rank].append(source, mine ? target : nullptr, bytes);
      if (rank == own_) source += bytes;
      if (mine) target += bytes;
    }
    return target;
  }

  const std::shared_ptr<Operation> operation_;
  const size_t own_, chunk_;
  std::vector<int64_t> table_;  // this rank's row counts
  uint64_t table_chunks_ = 0, tables_read_ = 0, data_chunks_ = 0;
  std::vector<std::vector<int64_t>> counts_;  // by rank: its table
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
          tasks.push_back(std::make_unique<AllreduceTask>(*operation, std::move(concatenation), world));
        }
      }
      break;
    case Kind::reducescatter:
      for (const DType dtype : dtypes_of(*operation->request)) {
        tasks.push_back(std::make_unique<ReducescatterTask>(*operation, dtype, own, ranks, chunk_bytes));
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
