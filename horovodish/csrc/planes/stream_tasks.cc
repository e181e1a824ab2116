#include "planes/stream_tasks.h"

#include <algorithm>
#include <cstring>

#include "fusion.h"

namespace horovodish {

namespace {

// A chunk of at most this many bytes is reduced by every rank for itself: below, the second wait for the peers costs more
// than the arithmetic that it saves.
constexpr size_t kUnsharedBytes = 16 << 10;
// Shards begin at multiples of a cache line, so that no two ranks write to one.
constexpr size_t kCacheLine = 64;

size_t ceil_divide(size_t a, size_t b) { return (a + b - 1) / b; }

// Reduces a range of the concatenation straight into its targets.
class AllreduceTask : public StreamTask {
 public:
  AllreduceTask(const Operation& operation, Concatenation concatenation, size_t own, size_t ranks, size_t chunk_bytes)
      : concatenation_(std::move(concatenation)),
        op_(operation.request->op),
        scaling_(operation.scaling()),
        own_(own),
        ranks_(ranks),
        item_(concatenation_.item_bytes()),
        chunk_(chunk_bytes / item_),
        sources_(ranks) {}

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }
  bool has_collect() const override { return concatenation_.count() * item_ > kUnsharedBytes; }

  void publish(uint64_t chunk, std::byte* slot) override {
    const Range range = whole(chunk);
    const Range own = has_collect() ? shard(range, own_) : Range{range.begin, 0};
    pack(range.begin, own.begin - range.begin, range, slot);
    // The own shard is reduced from where it lies; only a rank that has none to give puts the neutral value into its slot.
    if (own.count > 0 && concatenation_.segments().front().source == nullptr) pack(own.begin, own.count, range, slot);
    pack(own.begin + own.count, range.begin + range.count - own.begin - own.count, range, slot);
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    const Range range = whole(chunk);
    const bool shared = has_collect();
    const Range mine = shared ? shard(range, own_) : range;
    concatenation_.for_each_piece(
        mine.begin, mine.count,
        [&](const Concatenation::Segment& segment, size_t first, size_t length, size_t position) {
          const size_t offset = (mine.begin - range.begin + position) * item_;
          for (size_t rank = 0; rank < ranks_; ++rank) sources_[rank] = slots[rank] + offset;
          if (shared && segment.source != nullptr) sources_[own_] = segment.source + first * item_;
          std::byte* target = segment.target == nullptr ? slots[own_] + offset : segment.target + first * item_;
          reduce(concatenation_.dtype(), op_, target, sources_.data(), ranks_, length, scaling_);
          if (shared && target != slots[own_] + offset) std::memcpy(slots[own_] + offset, target, length * item_);
        });
  }

  void collect(uint64_t chunk, const Slots& slots) override {
    const Range range = whole(chunk);
    for (size_t rank = 0; rank < ranks_; ++rank) {
      if (rank == own_) continue;
      const Range theirs = shard(range, rank);
      concatenation_.unpack(theirs.begin, theirs.count, slots[rank] + (theirs.begin - range.begin) * item_);
    }
  }

 private:
  struct Range {
    size_t begin, count;  // elements of the concatenation
  };

  Range whole(uint64_t chunk) const {
    const size_t begin = chunk * chunk_;
    return {begin, std::min(chunk_, concatenation_.count() - begin)};
  }
  Range shard(const Range& range, size_t rank) const {
    const size_t line = kCacheLine / item_;
    const size_t length = ceil_divide(ceil_divide(range.count, ranks_), line) * line;
    const size_t begin = std::min(rank * length, range.count);
    return {range.begin + begin, std::min(length, range.count - begin)};
  }
  void pack(size_t begin, size_t count, const Range& range, std::byte* slot) const {
    concatenation_.pack(begin, count, op_, slot + (begin - range.begin) * item_);
  }

  const Concatenation concatenation_;
  const ReduceOp op_;
  const Scaling scaling_;
  const size_t own_, ranks_, item_, chunk_;
  std::vector<const void*> sources_;
};

class BroadcastTask : public StreamTask {
 public:
  BroadcastTask(const Operation& operation, size_t own, size_t chunk_bytes)
      : concatenation_(Concatenation::as_bytes(operation)),
        own_(own),
        root_(static_cast<size_t>(operation.root)),
        chunk_(chunk_bytes) {}

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (own_ == root_) concatenation_.pack(begin(chunk), length(chunk), ReduceOp::sum, slot);
  }
  void combine(uint64_t chunk, const Slots& slots) override {
    if (own_ != root_) return concatenation_.unpack(begin(chunk), length(chunk), slots[root_]);
    concatenation_.for_each_piece(
        begin(chunk), length(chunk), [](const Concatenation::Segment& segment, size_t first, size_t count, size_t) {
          if (segment.target != nullptr && segment.target != segment.source) {
            std::memcpy(segment.target + first, segment.source + first, count);
          }
        });
  }

 private:
  size_t begin(uint64_t chunk) const { return chunk * chunk_; }
  size_t length(uint64_t chunk) const { return std::min(chunk_, concatenation_.count() - begin(chunk)); }

  const Concatenation concatenation_;
  const size_t own_, root_, chunk_;
};

// Every rank publishes everything and reduces its own rows straight into its output.
class ReducescatterTask : public StreamTask {
 public:
  ReducescatterTask(const Operation& operation, DType dtype, size_t own, size_t ranks, size_t chunk_bytes)
      : concatenation_(dtype), op_(operation.request->op), scaling_(operation.scaling()), chunk_(chunk_bytes / bytes_of(dtype)) {
    const auto& members = operation.request->members;
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].dtype != dtype || members[i].count() == 0) continue;
      const auto row = static_cast<size_t>(members[i].count() / members[i].shape[0]);
      const Rows rows = rows_of(members[i].shape[0], own, ranks);
      own_.push_back({static_cast<size_t>(rows.begin) * row, static_cast<size_t>(rows.begin + rows.count) * row});
      concatenation_.append(operation.buffers[i].source, operation.buffers[i].target, static_cast<size_t>(members[i].count()));
    }
  }

  uint64_t chunks() const override { return ceil_divide(concatenation_.count(), chunk_); }
  void publish(uint64_t chunk, std::byte* slot) override { concatenation_.pack(begin(chunk), length(chunk), op_, slot); }
  void combine(uint64_t chunk, const Slots& slots) override {
    const size_t item = concatenation_.item_bytes();
    std::vector<const void*> sources(slots.size());
    concatenation_.for_each_piece(
        begin(chunk), length(chunk),
        [&](const Concatenation::Segment& segment, size_t first, size_t count, size_t position) {
          const Range own = own_[static_cast<size_t>(&segment - concatenation_.segments().data())];
          const size_t from = std::max(first, own.begin), to = std::min(first + count, own.end);
          if (segment.target == nullptr || from >= to) return;
          for (size_t rank = 0; rank < slots.size(); ++rank) sources[rank] = slots[rank] + (position + from - first) * item;
          reduce(concatenation_.dtype(), op_, segment.target + (from - own.begin) * item, sources.data(), slots.size(),
                 to - from, scaling_);
        });
  }

 private:
  struct Range {
    size_t begin, end;  // elements of the segment
  };
  size_t begin(uint64_t chunk) const { return chunk * chunk_; }
  size_t length(uint64_t chunk) const { return std::min(chunk_, concatenation_.count() - begin(chunk)); }

  Concatenation concatenation_;
  const ReduceOp op_;
  const Scaling scaling_;
  const size_t chunk_;
  std::vector<Range> own_;  // by segment: what this rank keeps
};

// Collectives whose lengths no rank knows beforehand. The first chunks carry every rank's table of row counts; the chunks after
// them carry the data of every rank side by side, and each rank copies out what is for it.
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
    const size_t begin = (chunk - table_chunks_) * chunk_;
    const size_t total = contributions_[own_].count();
    if (begin < total) contributions_[own_].pack(begin, std::min(chunk_, total - begin), ReduceOp::sum, slot);
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    for (size_t rank = 0; rank < counts_.size(); ++rank) {
      if (chunk < table_chunks_) {
        const auto [begin, bytes] = table_part(chunk);
        std::memcpy(reinterpret_cast<std::byte*>(counts_[rank].data()) + begin, slots[rank], bytes);
        continue;
      }
      const size_t begin = (chunk - table_chunks_) * chunk_;
      const size_t total = contributions_[rank].count();
      if (begin < total) contributions_[rank].unpack(begin, std::min(chunk_, total - begin), slots[rank]);
    }
    if (chunk < table_chunks_ && ++tables_read_ == table_chunks_) lay_out();
  }

 private:
  struct Part {
    size_t begin, bytes;
  };
  Part table_part(uint64_t chunk) const {
    return {chunk * chunk_, std::min(chunk_, table_.size() * sizeof(int64_t) - chunk * chunk_)};
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

std::vector<std::unique_ptr<StreamTask>> make_stream_tasks(const std::shared_ptr<Operation>& operation, size_t own,
                                                           size_t ranks, size_t chunk_bytes) {
  std::vector<std::unique_ptr<StreamTask>> tasks;
  switch (operation->request->kind) {
    case Kind::allreduce:
      for (Concatenation& concatenation : Concatenation::by_dtype(*operation)) {
        tasks.push_back(std::make_unique<AllreduceTask>(*operation, std::move(concatenation), own, ranks, chunk_bytes));
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
      tasks.push_back(std::make_unique<BroadcastTask>(*operation, own, chunk_bytes));
      break;
    case Kind::barrier:
    case Kind::join:
      break;  // that every rank has submitted it is all there is to do
  }
  return tasks;
}

}  // namespace horovodish
