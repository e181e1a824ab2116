#include "planes/stream/adasum_tasks.h"

#include <algorithm>
#include <vector>

#include "arithmetic/copy_bytes.h"
#include "arithmetic/standard_floats.h"
#include "planes/adasum.h"
#include "planes/mpi/schedule_run.h"
#include "planes/shards.h"

namespace horovodish {

namespace {

double scale_of(const Operation& operation) { return operation.request->prescale * operation.request->postscale; }

std::vector<Range> shards_of(size_t count, size_t ranks, size_t item) {
  std::vector<Range> shards;
  for (size_t rank = 0; rank < ranks; ++rank) shards.push_back(shard_of({0, count}, ranks, item, rank));
  return shards;
}

// The tensors' chunks for the products, then chunks with every rank's table of products, then the tensors' chunks again for
// the weighted sum.
class AdasumStream : public StreamTask {
 public:
  AdasumStream(const Operation& operation, Concatenation concatenation, size_t own, size_t ranks, size_t chunk_bytes)
      : concatenation_(std::move(concatenation)),
        own_(own),
        chunk_bytes_(chunk_bytes),
        chunk_(chunk_bytes / concatenation_.item_bytes()),
        data_chunks_(ceil_divide(concatenation_.count(), chunk_)),
        adasum_(concatenation_, ranks, scale_of(operation)),
        table_chunks_(ceil_divide(table_bytes(), chunk_bytes)),
        table_(adasum_.table_size()) {}

  // No rank knows its products before it has seen all chunks.
  uint64_t chunks() const override { return all_chunks_known() ? 2 * data_chunks_ + table_chunks_ : data_chunks_; }
  bool all_chunks_known() const override { return multiplied_ == data_chunks_; }
  Stages stages() const override { return {.publish = true, .combine = true, .collect = true}; }

  void publish(uint64_t chunk, std::byte* slot) override {
    if (is_table(chunk)) {
      const auto [begin, bytes] = table_part(chunk);
      copy_bytes(slot, reinterpret_cast<const std::byte*>(adasum_.table()) + begin, bytes);
    } else {
      concatenation_.pack(whole(chunk), ReduceOp::adasum, slot);
    }
  }

  void combine(uint64_t chunk, const Slots& slots) override {
    if (is_table(chunk)) return add_tables(chunk, slots);
    const Range range = whole(chunk);
    const size_t item = concatenation_.item_bytes();
    const Range part = shard_of(range, slots.size(), item, own_);
    const size_t offset = (part.begin - range.begin) * item;
    std::vector<const std::byte*> sources;
    for (const std::byte* slot : slots) sources.push_back(slot + offset);
    if (chunk < data_chunks_) {
      adasum_.add_products(part, sources);
      ++multiplied_;
    } else {
      adasum_.combine(part, sources, slots[own_] + offset);
    }
  }

  void collect(uint64_t chunk, const Slots& slots) override {
    if (chunk < data_chunks_ || is_table(chunk)) return;
    const Range range = whole(chunk);
    const size_t item = concatenation_.item_bytes();
    for (size_t rank = 0; rank < slots.size(); ++rank) {
      const Range part = shard_of(range, slots.size(), item, rank);
      concatenation_.unpack(part, slots[rank] + (part.begin - range.begin) * item);
    }
  }

 private:
  size_t table_bytes() const { return adasum_.table_size() * sizeof(double); }
  bool is_table(uint64_t chunk) const { return chunk >= data_chunks_ && chunk < data_chunks_ + table_chunks_; }
  Range table_part(uint64_t chunk) const { return piece_of(table_bytes(), chunk_bytes_, chunk - data_chunks_); }
  Range whole(uint64_t chunk) const {
    return piece_of(concatenation_.count(), chunk_,
                    chunk < data_chunks_ ? chunk : chunk - data_chunks_ - table_chunks_);
  }

  void add_tables(uint64_t chunk, const Slots& slots) {
    const auto [begin, bytes] = table_part(chunk);
    const size_t first = begin / sizeof(double);
    const StandardFloats mode;
    for (const std::byte* slot : slots) {
      const auto* theirs = reinterpret_cast<const double*>(slot);
      for (size_t i = 0; i < bytes / sizeof(double); ++i) table_[first + i] += theirs[i];
    }
    if (chunk + 1 == data_chunks_ + table_chunks_) adasum_.set_table(std::move(table_));
  }

  const Concatenation concatenation_;
  const size_t own_, chunk_bytes_, chunk_;  // chunk_: in elements
  const uint64_t data_chunks_;
  Adasum adasum_;
  const uint64_t table_chunks_;
  std::vector<double> table_;  // of all ranks
  uint64_t multiplied_ = 0;    // chunks
};

// Every rank gets everybody's part of its own shard, of the gradients and then of the tables of products, and in the end
// everybody's shard of the result: in bytes what a ring takes, in fewer steps.
class AdasumRun : public MpiTask {
 public:
  AdasumRun(const MpiEnvironment& environment, double scale, Concatenation concatenation)
      : environment_(environment),
        concatenation_(std::move(concatenation)),
        ranks_(static_cast<size_t>(environment.ranks())),
        own_(static_cast<size_t>(environment.rank)),
        item_(concatenation_.item_bytes()),
        buffer_(concatenation_.count() * item_),
        adasum_(concatenation_, ranks_, scale),
        shards_(shards_of(concatenation_.count(), ranks_, item_)),
        table_shards_(shards_of(adasum_.table_size(), ranks_, sizeof(double))) {
    concatenation_.pack(concatenation_.whole(), ReduceOp::adasum, buffer_.data());
    exchange(buffer_.data(), shards_, item_, theirs_);
    step();
  }

  bool advance() override {
    if (done()) return false;
    const bool progressed = run_->advance();
    step();
    return progressed;
  }
  bool done() const override { return !run_; }
  void cancel_receives() noexcept override {
    if (run_) run_->cancel_receives();
  }

 private:
  enum class Step { gradients, products, tables, result };

  void step() {
    while (run_ && run_->done()) next();
  }

  void next() {
    switch (step_) {
      case Step::gradients:
        step_ = Step::products;
        adasum_.add_products(shards_[own_], pointers(theirs_, item_));
        table_.assign(adasum_.table(), adasum_.table() + adasum_.table_size());
        return exchange(bytes(table_), table_shards_, sizeof(double), their_tables_);
      case Step::products:
        step_ = Step::tables;
        add_tables();
        return gather(bytes(table_), table_shards_, sizeof(double));
      case Step::tables:
        step_ = Step::result;
        adasum_.set_table(std::move(table_));
        adasum_.combine(shards_[own_], pointers(theirs_, item_), buffer_.data() + shards_[own_].begin * item_);
        return gather(buffer_.data(), shards_, item_);
      case Step::result:
        concatenation_.unpack(concatenation_.whole(), buffer_.data());
        run_.reset();
    }
  }

  static std::byte* bytes(std::vector<double>& numbers) { return reinterpret_cast<std::byte*>(numbers.data()); }

  // Everybody's part of the own shard, one after the other.
  void exchange(const std::byte* values, const std::vector<Range>& shards, size_t item,
                std::vector<std::byte>& theirs) {
    const size_t length = shards[own_].count * item;
    theirs.resize(ranks_ * length);
    if (length > 0) copy_bytes(theirs.data() + own_ * length, values + shards[own_].begin * item, length);
    std::vector<Range> sent, received;
    for (size_t rank = 0; rank < ranks_; ++rank) {
      sent.push_back({shards[rank].begin * item, shards[rank].count * item});
      received.push_back({rank * length, length});
    }
    auto schedule =
        direct_exchange(environment_.rank, environment_.ranks(), sent, received, environment_.segment_bytes);
    run_ = std::make_unique<ScheduleRun>(environment_, std::move(schedule), theirs.data(), 1, nullptr, values);
  }

  void gather(std::byte* values, const std::vector<Range>& shards, size_t item) {
    const size_t segment = std::max<size_t>(1, environment_.segment_bytes / item);
    run_ = std::make_unique<ScheduleRun>(
        environment_, direct_allgather(environment_.rank, environment_.ranks(), shards, segment), values, item);
  }

  std::vector<const std::byte*> pointers(const std::vector<std::byte>& theirs, size_t item) const {
    std::vector<const std::byte*> result;
    for (size_t rank = 0; rank < ranks_; ++rank) result.push_back(theirs.data() + rank * shards_[own_].count * item);
    return result;
  }

  // Of this rank's shard of the table, in the order of ranks.
  void add_tables() {
    const StandardFloats mode;
    const auto [begin, count] = table_shards_[own_];
    std::fill_n(table_.begin() + static_cast<std::ptrdiff_t>(begin), count, 0.0);
    const auto* theirs = reinterpret_cast<const double*>(their_tables_.data());
    for (size_t i = 0; i < ranks_ * count; ++i) table_[begin + i % count] += theirs[i];
  }

  const MpiEnvironment environment_;
  const Concatenation concatenation_;
  const size_t ranks_, own_, item_;
  std::vector<std::byte> buffer_;  // the own values, then the result
  Adasum adasum_;
  const std::vector<Range> shards_, table_shards_;  // by rank
  std::vector<std::byte> theirs_, their_tables_;    // everybody's part of the own shard
  std::vector<double> table_;
  Step step_ = Step::gradients;
  std::unique_ptr<ScheduleRun> run_;
};

// Between hosts: one exchange of all ranks.
class AdasumBetweenHosts : public StreamTask {
 public:
  AdasumBetweenHosts(const Operation& operation, Concatenation concatenation, const StreamWorld& world)
      : concatenation_(std::move(concatenation)), scale_(scale_of(operation)), world_(world) {}

  uint64_t chunks() const override { return 1; }
  Stages stages() const override { return {.publish = false, .combine = false, .collect = false}; }
  std::vector<std::unique_ptr<MpiTask>> exchange(uint64_t, uint64_t sequence, const Slots&) override {
    std::vector<std::unique_ptr<MpiTask>> tasks;
    tasks.push_back(std::make_unique<AdasumRun>(world_.everybody(sequence), scale_, concatenation_));
    return tasks;
  }

 private:
  const Concatenation concatenation_;
  const double scale_;
  const StreamWorld world_;
};

}  // namespace

std::shared_ptr<StreamTask> make_adasum_task(const Operation& operation, Concatenation concatenation,
                                             const StreamWorld& world) {
  if (world.others != nullptr) return std::make_shared<AdasumBetweenHosts>(operation, std::move(concatenation), world);
  return std::make_shared<AdasumStream>(operation, std::move(concatenation), world.own, world.ranks, world.chunk_bytes);
}

}  // namespace horovodish
