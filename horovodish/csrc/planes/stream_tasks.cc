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
        root_(static_cast<size_t>(operation.request->root)),
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

// Chunk 0 carries the first dimensions of all members; the chunks after it carry the data of every rank side by side.
class AllgatherTask : public StreamTask {
 public:
  AllgatherTask(std::shared_ptr<Operation> operation, size_t own, size_t ranks, size_t chunk_bytes)
      : operation_(std::move(operation)),
        own_(own),
        ranks_(ranks),
        chunk_(chunk_bytes),
        members_(operation_->request->members.size()),
        header_chunks_(ceil_divide(members_ * sizeof(int64_t), chunk_bytes)),
        first_dims_(members_, std::vector<int64_t>(ranks)) {}

  uint64_t chunks() const override { return header_chunks_ + data_chunks_; }
  bool all_chunks_known() const override { return headers_read_ == header_chunks_; }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (chunk < header_chunks_) {
      const auto [begin, end] = header_members(chunk);
      for (size_t i = begin; i < end; ++i) {
        std::memcpy(slot + (i - begin) * sizeof(int64_t), &operation_->buffers[i].first_dim, sizeof(int64_t));
      }
      return;
    }
    const size_t begin = (chunk - header_chunks_) * chunk_;
    const size_t total = contributions_[own_].count();
    if (begin < total) contributions_[own_].pack(begin, std::min(chunk_, total - begin), ReduceOp::sum, slot);
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    if (chunk < header_chunks_) return read_header(chunk, slots);
    const size_t begin = (chunk - header_chunks_) * chunk_;
    for (size_t rank = 0; rank < ranks_; ++rank) {
      const size_t total = contributions_[rank].count();
      if (begin < total) contributions_[rank].unpack(begin, std::min(chunk_, total - begin), slots[rank]);
    }
  }

 private:
  std::pair<size_t, size_t> header_members(uint64_t chunk) const {
    const size_t per_chunk = chunk_ / sizeof(int64_t);
    return {chunk * per_chunk, std::min(members_, (chunk + 1) * per_chunk)};
  }

  void read_header(uint64_t chunk, const Slots& slots) {
    const auto [begin, end] = header_members(chunk);
    for (size_t i = begin; i < end; ++i) {
      for (size_t rank = 0; rank < ranks_; ++rank) {
        std::memcpy(&first_dims_[i][rank], slots[rank] + (i - begin) * sizeof(int64_t), sizeof(int64_t));
      }
    }
    if (++headers_read_ == header_chunks_) lay_out();
  }

  void lay_out() {
    contributions_.assign(ranks_, Concatenation(DType::uint8));
    for (size_t i = 0; i < members_; ++i) {
      Handle::Output& output = allocate_gathered(*operation_, i, first_dims_[i]);
      const size_t row = row_bytes(operation_->request->members[i]);
      size_t offset = 0;
      for (size_t rank = 0; rank < ranks_; ++rank) {
        const size_t bytes = row * static_cast<size_t>(first_dims_[i][rank]);
        contributions_[rank].append(operation_->buffers[i].source, output.data.get() + offset, bytes);
        offset += bytes;
      }
    }
    for (const Concatenation& contribution : contributions_) {
      data_chunks_ = std::max(data_chunks_, ceil_divide(contribution.count(), chunk_));
    }
  }

  const std::shared_ptr<Operation> operation_;
  const size_t own_, ranks_, chunk_, members_;
  const uint64_t header_chunks_;
  uint64_t headers_read_ = 0;
  uint64_t data_chunks_ = 0;
  std::vector<std::vector<int64_t>> first_dims_;  // by member and rank
  std::vector<Concatenation> contributions_;      // by rank: its rows in the outputs
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
    case Kind::allgather:
      tasks.push_back(std::make_unique<AllgatherTask>(operation, own, ranks, chunk_bytes));
      break;
    case Kind::broadcast:
      tasks.push_back(std::make_unique<BroadcastTask>(*operation, own, chunk_bytes));
      break;
    case Kind::barrier:
      break;  // every rank has submitted it, which is what a barrier is for
  }
  return tasks;
}

}  // namespace horovodish
