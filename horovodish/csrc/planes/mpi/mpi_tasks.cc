#include "planes/mpi/mpi_tasks.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "arithmetic/reduce.h"
#include "planes/adasum_tasks.h"
#include "planes/fusion.h"

namespace horovodish {

namespace {

// An allreduce of at most this many bytes and ranks takes one step, in which everybody sends everything to everybody.
constexpr size_t kDirectBytes = 8 << 10;
constexpr int kDirectRanks = 16;

// What a ring does with a segment that comes in; the last time with the scale of the result.
ScheduleRun::ReduceInto ring_step(DType dtype, ReduceOp op, const Scaling& scaling) {
  const Scaling last{.postscale = scaling.postscale, .divisor = scaling.divisor};
  return [dtype, op, last](std::byte* range, const std::byte* incoming, size_t count, bool finish) {
    const void* sources[] = {incoming, range};
    reduce(dtype, op, range, sources, 2, count, finish ? last : Scaling{});
  };
}

// An allreduce in place.
class ContiguousAllreduce : public MpiTask {
 public:
  ContiguousAllreduce(const MpiEnvironment& environment, DType dtype, ReduceOp op, const Scaling& scaling,
                      std::byte* buffer, size_t count)
      : dtype_(dtype), op_(op), scaling_(scaling), buffer_(buffer), count_(count) {
    const size_t item = bytes_of(dtype), bytes = count * item;
    if (bytes <= kDirectBytes && environment.ranks() <= kDirectRanks) {
      const auto ranks = static_cast<size_t>(environment.ranks());
      blocks_.resize(ranks * bytes);
      std::memcpy(blocks_.data() + static_cast<size_t>(environment.rank) * bytes, buffer, bytes);
      std::vector<size_t> begins(ranks + 1);
      for (size_t i = 0; i <= ranks; ++i) begins[i] = i * count;
      run_.emplace(environment, direct_allgather(environment.rank, environment.ranks(), begins, count), blocks_.data(),
                   item);
      return;
    }
    if (scaling.prescale != 1.0) {
      const void* source = buffer;
      reduce(dtype, op, buffer, &source, 1, count, {.prescale = scaling.prescale});
    }
    const size_t segment = std::max<size_t>(1, environment.segment_bytes / item);
    run_.emplace(environment, ring_allreduce(environment.rank, environment.ranks(), count, segment), buffer, item,
                 ring_step(dtype, op, scaling));
  }

  bool advance() override {
    const bool progressed = run_->advance();
    if (run_->done() && !blocks_.empty()) finish();
    return progressed;
  }
  bool done() const override { return run_->done(); }
  void cancel_receives() noexcept override { run_->cancel_receives(); }

 private:
  void finish() {
    const size_t bytes = count_ * bytes_of(dtype_);
    std::vector<const void*> sources(blocks_.size() / bytes);
    for (size_t i = 0; i < sources.size(); ++i) sources[i] = blocks_.data() + i * bytes;
    reduce(dtype_, op_, buffer_, sources.data(), sources.size(), count_, scaling_);
    blocks_.clear();
  }

  const DType dtype_;
  const ReduceOp op_;
  const Scaling scaling_;
  std::byte* const buffer_;
  const size_t count_;
  std::vector<std::byte> blocks_;  // of all ranks, where they send everything to each other
  std::optional<ScheduleRun> run_;
};

// What is done to a concatenation in one piece of memory: in the target where there is just one, otherwise in a buffer into
// which the tensors are packed.
class InOnePiece : public MpiTask {
 public:
  explicit InOnePiece(Concatenation concatenation) : concatenation_(std::move(concatenation)) {
    const auto& first = concatenation_.tensors().front();
    memory_ = concatenation_.tensors().size() == 1 ? first.target : nullptr;
    if (memory_ != nullptr) return;
    fusion_buffer_ = std::make_unique_for_overwrite<std::byte[]>(concatenation_.count() * concatenation_.item_bytes());
    memory_ = fusion_buffer_.get();
  }
  void allreduce(const MpiEnvironment& environment, const Operation& operation) {
    const ReduceOp op = operation.request->op;
    pack(op, operation.packing_scale());
    run_ =
        make_allreduce(environment, concatenation_.dtype(), op, operation.scaling(), memory_, concatenation_.count());
  }
  void broadcast(const MpiEnvironment& environment, int root) {
    if (root == environment.rank) pack(ReduceOp::sum, 1.0);
    run_ = make_broadcast(environment, root, memory_, concatenation_.count());
  }

  bool advance() override {
    if (done()) return false;
    const bool progressed = run_->advance();
    if (run_->done() && fusion_buffer_) concatenation_.unpack(concatenation_.whole(), fusion_buffer_.get());
    return progressed;
  }
  bool done() const override { return run_->done(); }
  void cancel_receives() noexcept override { run_->cancel_receives(); }

 private:
  void pack(ReduceOp op, double scale) {
    if (memory_ == concatenation_.tensors().front().source && scale == 1.0) return;
    concatenation_.pack(concatenation_.whole(), op, memory_, scale);
  }

  const Concatenation concatenation_;
  std::unique_ptr<std::byte[]> fusion_buffer_;
  std::byte* memory_;
  std::unique_ptr<MpiTask> run_;
};

// Tasks one after the other, such as one for each dtype of an operation.
class Sequence : public MpiTask {
 public:
  using Make = std::function<std::unique_ptr<MpiTask>(size_t index)>;

  Sequence(size_t count, Make make) : count_(count), make_(std::move(make)) { next(); }
  bool advance() override {
    if (!run_) return false;
    const bool progressed = run_->advance();
    if (run_->done()) next();
    return progressed;
  }
  bool done() const override { return !run_; }
  void cancel_receives() noexcept override {
    if (run_) run_->cancel_receives();
  }

 private:
  void next() {
    do {
      run_.reset();
      if (started_ == count_) return;
      run_ = make_(started_++);
    } while (run_->done());
  }

  const size_t count_;
  const Make make_;
  size_t started_ = 0;
  std::unique_ptr<MpiTask> run_;
};

std::unique_ptr<MpiTask> make_allreduce_of_dtypes(const Operation& operation, const MpiEnvironment& environment) {
  auto by_dtype = Concatenation::by_dtype(operation);
  std::erase_if(by_dtype, [](const Concatenation& concatenation) { return concatenation.count() == 0; });
  const size_t count = by_dtype.size();
  return std::make_unique<Sequence>(
      count, [&operation, environment, by_dtype = std::move(by_dtype)](size_t index) -> std::unique_ptr<MpiTask> {
        if (operation.request->op == ReduceOp::adasum) return make_adasum(environment, operation, by_dtype[index]);
        auto task = std::make_unique<InOnePiece>(by_dtype[index]);
        task->allreduce(environment, operation);
        return task;
      });
}

class ContiguousBroadcast : public MpiTask {
 public:
  ContiguousBroadcast(const MpiEnvironment& environment, int root, std::byte* buffer, size_t bytes)
      : run_(environment, tree_broadcast(environment.rank, environment.ranks(), root, bytes, environment.segment_bytes),
             buffer, 1) {}
  bool advance() override { return run_.advance(); }
  bool done() const override { return run_.done(); }
  void cancel_receives() noexcept override { run_.cancel_receives(); }

 private:
  ScheduleRun run_;
};

std::unique_ptr<MpiTask> make_broadcast_of_tensors(const Operation& operation, const MpiEnvironment& environment) {
  Concatenation bytes = Concatenation::as_bytes(operation);
  if (bytes.count() == 0) return nullptr;
  auto task = std::make_unique<InOnePiece>(std::move(bytes));
  task->broadcast(environment, operation.root);
  return task;
}

// One dtype of a reducescatter: the tensors are packed so that what belongs to a rank lies together.
class ReducescatterRun : public MpiTask {
 public:
  ReducescatterRun(const MpiEnvironment& environment, const Operation& operation, DType dtype)
      : dtype_(dtype), op_(operation.request->op), begins_{0} {
    const auto ranks = static_cast<size_t>(environment.ranks()), own = static_cast<size_t>(environment.rank);
    const size_t item = bytes_of(dtype);
    Concatenation by_rank(dtype);
    const auto& members = operation.request->members;
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (size_t i = 0; i < members.size(); ++i) {
        if (members[i].dtype != dtype || members[i].count() == 0) continue;
        const Rows rows = rows_of(members[i].shape[0], rank, ranks);
        const auto row = static_cast<size_t>(members[i].count() / members[i].shape[0]);
        const Buffer& buffer = operation.buffers[i];
        const size_t skipped = static_cast<size_t>(rows.begin) * row * item;
        by_rank.append(buffer.source == nullptr ? nullptr : buffer.source + skipped,
                       rank == own ? buffer.target : nullptr, static_cast<size_t>(rows.count) * row);
      }
      begins_.push_back(by_rank.count());
    }
    concatenation_ = std::move(by_rank);
    buffer_.resize(concatenation_.count() * item);
    concatenation_.pack(concatenation_.whole(), op_, buffer_.data(), operation.packing_scale());
    const Scaling scaling = operation.scaling();
    if (scaling.prescale != 1.0) {
      const void* source = buffer_.data();
      reduce(dtype, op_, buffer_.data(), &source, 1, concatenation_.count(), {.prescale = scaling.prescale});
    }
    const size_t segment = std::max<size_t>(1, environment.segment_bytes / item);
    run_.emplace(environment, ring_reduce_scatter(environment.rank, environment.ranks(), begins_, segment),
                 buffer_.data(), item, ring_step(dtype, op_, scaling));
    own_ = own;
    if (run_->done()) finish();
  }

  bool advance() override {
    if (run_->done()) return false;
    const bool progressed = run_->advance();
    if (run_->done()) finish();
    return progressed;
  }
  bool done() const override { return run_->done(); }
  void cancel_receives() noexcept override { run_->cancel_receives(); }

 private:
  void finish() {
    const size_t begin = begins_[own_];
    concatenation_.unpack({begin, begins_[own_ + 1] - begin}, buffer_.data() + begin * bytes_of(dtype_));
  }

  const DType dtype_;
  const ReduceOp op_;
  std::vector<size_t> begins_;
  Concatenation concatenation_{DType::uint8};
  std::vector<std::byte> buffer_;
  size_t own_ = 0;
  std::optional<ScheduleRun> run_;
};

std::unique_ptr<MpiTask> make_reducescatter_of_dtypes(const Operation& operation, const MpiEnvironment& environment) {
  auto dtypes = dtypes_of(*operation.request);
  const size_t count = dtypes.size();
  return std::make_unique<Sequence>(count, [&operation, environment, dtypes = std::move(dtypes)](size_t index) {
    return std::make_unique<ReducescatterRun>(environment, operation, dtypes[index]);
  });
}

// Allgather and alltoall: first every rank's table of row counts, then the members one after the other.
class RowsTask : public MpiTask {
 public:
  RowsTask(std::shared_ptr<Operation> operation, const MpiEnvironment& environment)
      : operation_(std::move(operation)),
        environment_(environment),
        alltoall_(operation_->request->kind == Kind::alltoall),
        members_(operation_->request->members.size()),
        row_length_(members_ * (alltoall_ ? static_cast<size_t>(environment.ranks()) : 1)),
        tables_(row_length_ * static_cast<size_t>(environment.ranks())) {
    const auto ranks = static_cast<size_t>(environment.ranks());
    auto own = tables_.begin() + static_cast<std::ptrdiff_t>(row_length_ * static_cast<size_t>(environment.rank));
    for (const Buffer& buffer : operation_->buffers) {
      own = alltoall_ ? std::copy(buffer.splits.begin(), buffer.splits.end(), own)
                      : std::fill_n(own, 1, buffer.first_dim);
    }
    std::vector<size_t> begins(ranks + 1);
    for (size_t i = 0; i <= ranks; ++i) begins[i] = i * row_length_;
    run_ = std::make_unique<ScheduleRun>(environment,
                                         direct_allgather(environment.rank, environment.ranks(), begins, row_length_),
                                         reinterpret_cast<std::byte*>(tables_.data()), sizeof(int64_t));
  }
  bool advance() override {
    if (done()) return false;
    bool progressed = run_->advance();
    while (run_ && run_->done()) {
      next();
      progressed = true;
    }
    return progressed;
  }
  bool done() const override { return !run_; }
  void cancel_receives() noexcept override {
    if (run_) run_->cancel_receives();
  }

 private:
  // Rows of member `i` that `from` sends to `to`.
  size_t rows(size_t i, size_t from, size_t to) const {
    const auto ranks = static_cast<size_t>(environment_.ranks());
    return static_cast<size_t>(tables_[from * row_length_ + (alltoall_ ? i * ranks + to : i)]);
  }

  void next() {
    run_.reset();
    if (started_ == members_) return;
    const size_t i = started_++;
    const auto ranks = static_cast<size_t>(environment_.ranks()), own = static_cast<size_t>(environment_.rank);
    const size_t row = row_bytes(operation_->request->members[i]);
    std::vector<int64_t> incoming(ranks);
    std::vector<size_t> sent(ranks + 1), received(ranks + 1);
    for (size_t rank = 0; rank < ranks; ++rank) {
      incoming[rank] = static_cast<int64_t>(rows(i, rank, own));
      received[rank + 1] = received[rank] + row * rows(i, rank, own);
      sent[rank + 1] = sent[rank] + row * rows(i, own, rank);
    }
    std::byte* output = allocate_rows(*operation_, i, incoming).data.get();
    const std::byte* source = operation_->buffers[i].source;
    const size_t kept = row * rows(i, own, own);
    if (kept > 0) std::memcpy(output + received[own], source + (alltoall_ ? sent[own] : 0), kept);
    const MpiEnvironment& e = environment_;
    run_ = alltoall_
               ? std::make_unique<ScheduleRun>(e, direct_exchange(e.rank, e.ranks(), sent, received, e.segment_bytes),
                                               output, 1, nullptr, source)
               : std::make_unique<ScheduleRun>(e, direct_allgather(e.rank, e.ranks(), received, e.segment_bytes),
                                               output, 1);
  }

  const std::shared_ptr<Operation> operation_;
  const MpiEnvironment environment_;
  const bool alltoall_;
  const size_t members_, row_length_;
  std::vector<int64_t> tables_;  // by rank
  size_t started_ = 0;
  std::unique_ptr<ScheduleRun> run_;
};

}  // namespace

std::unique_ptr<MpiTask> make_allreduce(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                        const Scaling& scaling, std::byte* buffer, size_t count) {
  return std::make_unique<ContiguousAllreduce>(environment, dtype, op, scaling, buffer, count);
}

std::unique_ptr<MpiTask> make_broadcast(const MpiEnvironment& environment, int root, std::byte* buffer, size_t bytes) {
  return std::make_unique<ContiguousBroadcast>(environment, root, buffer, bytes);
}

std::unique_ptr<MpiTask> make_mpi_task(const std::shared_ptr<Operation>& operation, const MpiEnvironment& environment) {
  switch (operation->request->kind) {
    case Kind::allreduce:
      return make_allreduce_of_dtypes(*operation, environment);
    case Kind::reducescatter:
      return make_reducescatter_of_dtypes(*operation, environment);
    case Kind::allgather:
    case Kind::alltoall:
      return std::make_unique<RowsTask>(operation, environment);
    case Kind::broadcast:
      return make_broadcast_of_tensors(*operation, environment);
    case Kind::barrier:
    case Kind::join:
      return nullptr;  // that every rank has submitted it is all there is to do
  }
  return nullptr;
}

}  // namespace horovodish
