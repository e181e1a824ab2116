#include "planes/mpi/mpi_tasks.h"

#include <algorithm>

#include "arithmetic/copy_bytes.h"

namespace horovodish {

namespace {

// A schedule that reduces `count` elements in place, shard by shard.
std::unique_ptr<MpiTask> reduce_task(const MpiEnvironment& environment, Schedule schedule, DType dtype, ReduceOp op,
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
std::unique_ptr<MpiTask> pair_task(const MpiEnvironment& environment, Schedule schedule, DType dtype, ReduceOp op,
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
             direct_allgather(environment.rank, environment.ranks(), blocks(), segment_of(environment, dtype)),
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
  std::vector<Range> blocks() const {
    std::vector<Range> result;
    for (size_t i = 0; i < blocks_.size() / bytes_; ++i) result.push_back({i * count_, count_});
    return result;
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

}  // namespace

std::unique_ptr<MpiTask> make_allreduce(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                        const Scaling& scaling, std::byte* buffer, size_t count) {
  if (environment.ranks() == 2) {
    auto schedule = pair_allreduce(environment.rank, count, segment_of(environment, dtype));
    return pair_task(environment, std::move(schedule), dtype, op, scaling, buffer);
  }
  const auto algorithm = fastest_allreduce(environment.ranks(), count * bytes_of(dtype));
  if (algorithm == AllreduceAlgorithm::direct) {
    return std::make_unique<DirectAllreduce>(environment, dtype, op, scaling, buffer, count);
  }
  const auto schedule_of = algorithm == AllreduceAlgorithm::halving ? halving_allreduce : ring_allreduce;
  auto schedule = schedule_of(environment.rank, environment.ranks(), count, segment_of(environment, dtype));
  return reduce_task(environment, std::move(schedule), dtype, op, scaling, buffer, count);
}

std::unique_ptr<MpiTask> make_reduce_scatter(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                             const Scaling& scaling, std::byte* buffer,
                                             const std::vector<size_t>& begins) {
  auto schedule = ring_reduce_scatter(environment.rank, environment.ranks(), begins, segment_of(environment, dtype));
  return reduce_task(environment, std::move(schedule), dtype, op, scaling, buffer, begins.back());
}

std::unique_ptr<MpiTask> make_broadcast(const MpiEnvironment& environment, int root, std::byte* buffer, size_t bytes) {
  auto schedule = tree_broadcast(environment.rank, environment.ranks(), root, bytes, environment.segment_bytes);
  return std::make_unique<ScheduleRun>(environment, std::move(schedule), buffer, 1);
}

}  // namespace horovodish
