// The collectives between hosts on one piece of memory: their schedules and reductions.
#pragma once

#include <memory>
#include <vector>

#include "arithmetic/reduce.h"
#include "planes/mpi/schedule_run.h"

namespace horovodish {

std::unique_ptr<MpiTask> make_allreduce(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                        const Scaling& scaling, std::byte* buffer, size_t count);
// `shards`: the elements of each rank. Only this rank's shard is a result.
std::unique_ptr<MpiTask> make_reduce_scatter(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                             const Scaling& scaling, std::byte* buffer,
                                             const std::vector<Range>& shards);
std::unique_ptr<MpiTask> make_broadcast(const MpiEnvironment& environment, int root, std::byte* buffer, size_t bytes);

}  // namespace horovodish
