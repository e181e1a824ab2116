#include "planes/adasum_tasks.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "arithmetic/copy_bytes.h"
#include "arithmetic/standard_floats.h"
#include "planes/adasum.h"
#include "planes/shards.h"

namespace horovodish {

namespace {

double scale_of(const Operation& operation) { return operation.request->prescale * operation.request->postscale; }

// Where the shards of `count` elements begin, and where the last one ends.
std::vector<size_t> shards_of(size_t count, size_t ranks, size_t item) {
  std::vector<size_t> begins(ranks + 1);
  for (size_t rank = 0; rank <= ranks; ++rank) begins[rank] = shard_begin(count, ranks, item, rank);
  return begins;
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
  bool has_collect() const override { return true; }

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

// Every rank gets everybody's part of its own shard, then everybody's table of products, then everybody's shard of the
// result: in bytes what a ring takes, in fewer steps.
class AdasumRun : public MpiTask {
 public:
  AdasumRun(const MpiEnvironment& environment, const Operation& operation, Concatenation concatenation)
      : environment_(environment),
        concatenation_(std::move(concatenation)),
        ranks_(static_cast<size_t>(environment.ranks())),
        own_(static_cast<size_t>(environment.rank)),
        item_(concatenation_.item_bytes()),
        begins_(shards_of(concatenation_.count(), ranks_, item_)),
        buffer_(concatenation_.count() * item_),
        theirs_(ranks_ * own_bytes()),
        adasum_(concatenation_, ranks_, scale_of(operation)),
        tables_(ranks_ * adasum_.table_size()) {
    concatenation_.pack(concatenation_.whole(), ReduceOp::adasum, buffer_.data());
    if (own_bytes() > 0) copy_bytes(theirs_.data() + own_ * own_bytes(), shard(), own_bytes());
    std::vector<size_t> sent(begins_), received(ranks_ + 1);
    for (size_t& begin : sent) begin *= item_;
    for (size_t rank = 0; rank <= ranks_; ++rank) received[rank] = rank * own_bytes();
    run_ = std::make_unique<ScheduleRun>(
        environment_, direct_exchange(environment_.rank, environment_.ranks(), sent, received, segment(1)),
        theirs_.data(), 1, nullptr, buffer_.data());
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
  enum class Step { exchange, tables, gather };

  void step() {
    while (run_ && run_->done()) next();
  }

  void next() {
    switch (step_) {
      case Step::exchange:
        step_ = Step::tables;
        adasum_.add_products(own_shard(), theirs());
        std::copy_n(adasum_.table(), adasum_.table_size(), tables_.data() + own_ * adasum_.table_size());
        return gather(reinterpret_cast<std::byte*>(tables_.data()), sizeof(double), table_begins());
      case Step::tables:
        step_ = Step::gather;
        adasum_.set_table(sum_of_tables());
        adasum_.combine(own_shard(), theirs(), shard());
        return gather(buffer_.data(), item_, begins_);
      case Step::gather:
        concatenation_.unpack(concatenation_.whole(), buffer_.data());
        run_.reset();
    }
  }

  void gather(std::byte* buffer, size_t item, const std::vector<size_t>& begins) {
    run_ = std::make_unique<ScheduleRun>(
        environment_, direct_allgather(environment_.rank, environment_.ranks(), begins, segment(item)), buffer, item);
  }

  size_t segment(size_t item) const { return std::max<size_t>(1, environment_.segment_bytes / item); }
  Range own_shard() const { return {begins_[own_], begins_[own_ + 1] - begins_[own_]}; }
  size_t own_bytes() const { return own_shard().count * item_; }
  std::byte* shard() { return buffer_.data() + begins_[own_] * item_; }
  std::vector<const std::byte*> theirs() const {
    std::vector<const std::byte*> pointers;
    for (size_t rank = 0; rank < ranks_; ++rank) pointers.push_back(theirs_.data() + rank * own_bytes());
    return pointers;
  }
  std::vector<size_t> table_begins() const {
    std::vector<size_t> begins(ranks_ + 1);
    for (size_t rank = 0; rank <= ranks_; ++rank) begins[rank] = rank * adasum_.table_size();
    return begins;
  }
  std::vector<double> sum_of_tables() const {
    const StandardFloats mode;
    std::vector<double> sum(adasum_.table_size());
    for (size_t i = 0; i < tables_.size(); ++i) sum[i % sum.size()] += tables_[i];
    return sum;
  }

  const MpiEnvironment environment_;
  const Concatenation concatenation_;
  const size_t ranks_, own_, item_;
  const std::vector<size_t> begins_;  // of the shards
  std::vector<std::byte> buffer_;     // the own values, then the result
  std::vector<std::byte> theirs_;     // everybody's part of the own shard
  Adasum adasum_;
  std::vector<double> tables_;  // by rank
  Step step_ = Step::exchange;
  std::unique_ptr<ScheduleRun> run_;
};

}  // namespace

std::unique_ptr<StreamTask> make_adasum_stream(const Operation& operation, Concatenation concatenation, size_t own,
                                               size_t ranks, size_t chunk_bytes) {
  return std::make_unique<AdasumStream>(operation, std::move(concatenation), own, ranks, chunk_bytes);
}

std::unique_ptr<MpiTask> make_adasum(const MpiEnvironment& environment, const Operation& operation,
                                     Concatenation concatenation) {
  return std::make_unique<AdasumRun>(environment, operation, std::move(concatenation));
}

}  // namespace horovodish
