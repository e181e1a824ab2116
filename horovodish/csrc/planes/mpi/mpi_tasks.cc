#include "planes/mpi/mpi_tasks.h"

#include <algorithm>
#include <functional>

#include "arithmetic/copy_bytes.h"
#include "arithmetic/reduce.h"
#include "planes/adasum_tasks.h"
#include "planes/fusion.h"
#include "planes/rows.h"

namespace horovodish {

namespace {

// A schedule that reduces `count` elements in place, shard by shard.
std::unique_ptr<MpiTask> in_place(const MpiEnvironment& environment, Schedule schedule, DType dtype, ReduceOp op,
                                  const Scaling& scaling, std::byte* buffer, size_t count) {
  const auto [first, last] = in_stages(dtype, op, scaling, static_cast<size_t>(environment.ranks()));
  if (first.prescale != 1.0) {
    const void* source = buffer;
    reduce(dtype, op, buffer, &source, 1, count, first);
  }
  const auto step = [dtype, op, last = last](std::byte* range, const std::byte* incoming, size_t length, bool finish) {
    const void* sources[] = {incoming, range};
    reduce(dtype, op, range, sources, 2, length, finish ? last : Scaling{});
  };
  return std::make_unique<ScheduleRun>(environment, std::move(schedule), buffer, bytes_of(dtype), step);
}

// Each rank reduces everything, in the order of ranks, so both get the same bits.
std::unique_ptr<MpiTask> pair_of(const MpiEnvironment& environment, Schedule schedule, DType dtype, ReduceOp op,
                                 const Scaling& scaling, std::byte* buffer) {
  const auto step = [dtype, op, scaling, first = environment.rank == 0](std::byte* range, const std::byte* incoming,
                                                                        size_t length, bool) {
    const void* sources[] = {first ? range : incoming, first ? incoming : range};
    reduce(dtype, op, range, sources, 2, length, scaling);
  };
  return std::make_unique<ScheduleRun>(environment, std::move(schedule), buffer, bytes_of(dtype), step);
}

size_t segment_of(const MpiEnvironment& environment, DType dtype) {
  return std::max<size_t>(1, environment.segment_bytes / bytes_of(dtype));
}

// Every rank gets everybody's values and reduces them for itself.
class DirectAllreduce : public MpiTask {
 public:
  DirectAllreduce(const MpiEnvironment& environment, DType dtype, ReduceOp op, const Scaling& scaling,
                  std::byte* buffer, size_t count)
      : dtype_(dtype),
        op_(op),
        scaling_(scaling),
        buffer_(buffer),
        count_(count),
        bytes_(count * bytes_of(dtype)),
        blocks_(static_cast<size_t>(environment.ranks()) * bytes_),
        run_(environment,
             direct_allgather(environment.rank, environment.ranks(), begins(), segment_of(environment, dtype)),
             blocks_.data(), bytes_of(dtype)) {
    copy_bytes(blocks_.data() + static_cast<size_t>(environment.rank) * bytes_, buffer, bytes_);
  }

  bool advance() override {
    if (run_.done()) return false;
    const bool progressed = run_.advance();
    if (run_.done()) finish();
    return progressed;
  }
  bool done() const override { return run_.done(); }
  void cancel_receives() noexcept override { run_.cancel_receives(); }

 private:
  std::vector<size_t> begins() const {
    std::vector<size_t> begins(blocks_.size() / bytes_ + 1);
    for (size_t i = 0; i < begins.size(); ++i) begins[i] = i * count_;
    return begins;
  }
  void finish() {
    std::vector<const void*> sources(blocks_.size() / bytes_);
    for (size_t i = 0; i < sources.size(); ++i) sources[i] = blocks_.data() + i * bytes_;
    reduce(dtype_, op_, buffer_, sources.data(), sources.size(), count_, scaling_);
  }

  const DType dtype_;
  const ReduceOp op_;
  const Scaling scaling_;
  std::byte* const buffer_;
  const size_t count_, bytes_;
  std::vector<std::byte> blocks_;  // by rank
  ScheduleRun run_;
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
  // `begins`: where what belongs to each rank begins, and the end of all.
  void reducescatter(const MpiEnvironment& environment, const Operation& operation, const std::vector<size_t>& begins) {
    const ReduceOp op = operation.request->op;
    const DType dtype = concatenation_.dtype();
    pack(op, operation.packing_scale());
    auto schedule = ring_reduce_scatter(environment.rank, environment.ranks(), begins, segment_of(environment, dtype));
    run_ = in_place(environment, std::move(schedule), dtype, op, operation.scaling(), memory_, concatenation_.count());
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

std::unique_ptr<MpiTask> make_broadcast_of_tensors(const Operation& operation, const MpiEnvironment& environment) {
  Concatenation bytes = Concatenation::as_bytes(operation);
  if (bytes.count() == 0) return nullptr;
  auto task = std::make_unique<InOnePiece>(std::move(bytes));
  task->broadcast(environment, operation.root);
  return task;
}

std::unique_ptr<MpiTask> make_reducescatter_of_dtypes(const Operation& operation, const MpiEnvironment& environment) {
  auto values = by_rank(operation, static_cast<size_t>(environment.rank), static_cast<size_t>(environment.ranks()));
  std::erase_if(values, [](const ByRank& each) { return each.concatenation.count() == 0; });
  const size_t count = values.size();
  return std::make_unique<Sequence>(count, [&operation, environment, values = std::move(values)](size_t index) {
    auto task = std::make_unique<InOnePiece>(values[index].concatenation);
    task->reducescatter(environment, operation, values[index].begins);
    return task;
  });
}

// Allgather and alltoall: first every rank's line of the table, then the members one after the other.
class RowsTask : public MpiTask {
 public:
  RowsTask(std::shared_ptr<Operation> operation, const MpiEnvironment& environment)
      : operation_(std::move(operation)),
        environment_(environment),
        ranks_(static_cast<size_t>(environment.ranks())),
        own_(static_cast<size_t>(environment.rank)),
        table_(*operation_, own_, ranks_) {
    std::vector<size_t> begins(ranks_ + 1);
    for (size_t i = 0; i <= ranks_; ++i) begins[i] = i * table_.line_length();
    auto schedule = direct_allgather(environment.rank, environment.ranks(), begins, table_.line_length());
    auto* memory = reinterpret_cast<std::byte*>(table_.line(0));
    run_ = std::make_unique<ScheduleRun>(environment, std::move(schedule), memory, sizeof(int64_t));
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
  void next() {
    run_.reset();
    if (started_ == operation_->buffers.size()) return;
    const size_t i = started_++, row = row_bytes(operation_->request->members[i]);
    const auto bytes = [&](size_t from, size_t to) { return row * static_cast<size_t>(table_.between(i, from, to)); };
    std::vector<size_t> sent(ranks_ + 1), received(ranks_ + 1);
    for (size_t rank = 0; rank < ranks_; ++rank) {
      received[rank + 1] = received[rank] + bytes(rank, own_);
      sent[rank + 1] = sent[rank] + bytes(own_, rank);
    }
    std::byte* output = allocate_rows(*operation_, i, table_.incoming(i)).data.get();
    const std::byte* source = operation_->buffers[i].source;
    const bool alltoall = operation_->request->kind == Kind::alltoall;
    const size_t kept = bytes(own_, own_);
    if (kept > 0) copy_bytes(output + received[own_], source + (alltoall ? sent[own_] : 0), kept);
    const MpiEnvironment& e = environment_;
    run_ = alltoall
               ? std::make_unique<ScheduleRun>(e, direct_exchange(e.rank, e.ranks(), sent, received, e.segment_bytes),
                                               output, 1, nullptr, source)
               : std::make_unique<ScheduleRun>(e, direct_allgather(e.rank, e.ranks(), received, e.segment_bytes),
                                               output, 1);
  }

  const std::shared_ptr<Operation> operation_;
  const MpiEnvironment environment_;
  const size_t ranks_, own_;
  RowTable table_;
  size_t started_ = 0;
  std::unique_ptr<ScheduleRun> run_;
};

}  // namespace

std::unique_ptr<MpiTask> make_allreduce(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                        const Scaling& scaling, std::byte* buffer, size_t count) {
  if (environment.ranks() == 2) {
    auto schedule = pair_allreduce(environment.rank, count, segment_of(environment, dtype));
    return pair_of(environment, std::move(schedule), dtype, op, scaling, buffer);
  }
  const auto algorithm = fastest_allreduce(environment.ranks(), count * bytes_of(dtype));
  if (algorithm == AllreduceAlgorithm::direct) {
    return std::make_unique<DirectAllreduce>(environment, dtype, op, scaling, buffer, count);
  }
  const auto schedule_of = algorithm == AllreduceAlgorithm::halving ? halving_allreduce : ring_allreduce;
  auto schedule = schedule_of(environment.rank, environment.ranks(), count, segment_of(environment, dtype));
  return in_place(environment, std::move(schedule), dtype, op, scaling, buffer, count);
}

std::unique_ptr<MpiTask> make_broadcast(const MpiEnvironment& environment, int root, std::byte* buffer, size_t bytes) {
  auto schedule = tree_broadcast(environment.rank, environment.ranks(), root, bytes, environment.segment_bytes);
  return std::make_unique<ScheduleRun>(environment, std::move(schedule), buffer, 1);
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
