// The collectives between hosts: a schedule, the memory that it runs on, and what comes before and after.
#pragma once

#include <memory>
#include <vector>

#include "operation/operation.h"
#include "planes/mpi/schedule_run.h"

namespace horovodish {

// Collectives on one piece of memory.
std::unique_ptr<MpiTask> make_allreduce(const MpiEnvironment& environment, DType dtype, ReduceOp op,
                                        const Scaling& scaling, std::byte* buffer, size_t count);
std::unique_ptr<MpiTask> make_broadcast(const MpiEnvironment& environment, int root, std::byte* buffer, size_t bytes);

// The task of an operation; null where deciding the operation was all there was to do.
std::unique_ptr<MpiTask> make_mpi_task(const std::shared_ptr<Operation>& operation, const MpiEnvironment& environment);

}  // namespace horovodish
