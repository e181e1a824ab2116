#include "planes/mpi/mpi_tasks.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "arithmetic/copy_bytes.h"

namespace horovodish {

namespace {

// A schedule that reduces these elements in place, shard by shard.
std::unique_ptr<MpiTask> reduce_task(const MpiEnvironment& environment, Schedule schedule, DType dtype, ReduceOp op,
                                     const Scaling& scaling, std::byte* buffer, const std::vector<Range>& elements) {
  const auto [first, last] = in_stages(dtype, op, scaling, static_cast<size_t>(environment.ranks()));
  for (const auto& [begin, count] : elements) {
    if (first.prescale == 1.0) break;
    std::byte* const target = buffer + begin * bytes_of(dtype);
    const void* source = target;
    reduce(dtype, op, target, &source, 1, count, first);
  }
  const auto step = [dtype, op, last = last](std::byte* range, const std::byte* incoming, size_t length, bool finish) {
    const void* sources[] = {incoming, range};
    reduce(dtype, op, range, sources, 2, length, finish ? last : Scaling{});
  };
  return std::make_unique<ScheduleRun>(environment, std::move(schedule), buffer, bytes_of(dtype), step);
}

// Each rank reduces all elements in the order of ranks, so both ranks get the same bits.
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

// Every rank gets the values of all ranks and reduces them itself.
std::unique_ptr<MpiTask> direct_task(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                     const Scaling& scaling, std::byte* buffer, size_t count) {
  const auto ranks = static_cast<size_t>(environment.ranks());
  const size_t bytes = count * bytes_of(dtype);
  const auto blocks = std::make_shared<std::vector<std::byte>>(ranks * bytes);  // by rank
  copy_bytes(blocks->data() + static_cast<size_t>(environment.rank) * bytes, buffer, bytes);
  std::vector<Range> ranges;
  for (size_t i = 0; i < ranks; ++i) ranges.push_back({i * count, count});
  const std::vector<Range> sent(ranks, ranges[static_cast<size_t>(environment.rank)]);
  auto schedule = direct_exchange(environment.rank, environment.ranks(), sent, ranges, segment_of(environment, dtype));
  const auto finish = [=] {
    std::vector<const void*> sources(ranks);
    for (size_t i = 0; i < ranks; ++i) sources[i] = blocks->data() + i * bytes;
    reduce(dtype, op, buffer, sources.data(), ranks, count, scaling);
  };
  return std::make_unique<ScheduleRun>(environment, std::move(schedule), blocks->data(), bytes_of(dtype), nullptr,
                                       nullptr, finish);
}

}  // namespace

std::unique_ptr<MpiTask> make_allreduce(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                        const Scaling& scaling, std::byte* buffer, size_t count) {
  if (environment.ranks() == 2) {
    auto schedule = pair_allreduce(environment.rank, count, segment_of(environment, dtype));
    return pair_task(environment, std::move(schedule), dtype, op, scaling, buffer);
  }
  const auto algorithm = fastest_allreduce(environment.ranks(), count * bytes_of(dtype));
  if (algorithm == AllreduceAlgorithm::direct) {
    return direct_task(environment, dtype, op, scaling, buffer, count);
  }
  const auto schedule_of = algorithm == AllreduceAlgorithm::two_step  ? two_step_allreduce
                           : algorithm == AllreduceAlgorithm::halving ? halving_allreduce
                                                                      : ring_allreduce;
  auto schedule = schedule_of(environment.rank, environment.ranks(), count, segment_of(environment, dtype));
  return reduce_task(environment, std::move(schedule), dtype, op, scaling, buffer, {{0, count}});
}

std::unique_ptr<MpiTask> make_reduce_scatter(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                             const Scaling& scaling, std::byte* buffer,
                                             const std::vector<Range>& shards) {
  auto schedule = ring_reduce_scatter(environment.rank, environment.ranks(), shards, segment_of(environment, dtype));
  return reduce_task(environment, std::move(schedule), dtype, op, scaling, buffer, shards);
}

std::unique_ptr<MpiTask> make_broadcast(const MpiEnvironment& environment, int root, std::byte* buffer, size_t bytes) {
  auto schedule = tree_broadcast(environment.rank, environment.ranks(), root, bytes, environment.segment_bytes);
  return std::make_unique<ScheduleRun>(environment, std::move(schedule), buffer, 1);
}

}  // namespace horovodish
