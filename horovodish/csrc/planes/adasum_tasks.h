// Adasum as a sequence of chunks within a host, and between hosts.
#pragma once

#include <memory>

#include "planes/fusion.h"
#include "planes/mpi/schedule_run.h"
#include "planes/shared_memory/shared_memory.h"

namespace horovodish {

// One dtype of an allreduce whose op is Adasum.
std::unique_ptr<StreamTask> make_adasum_stream(const Operation& operation, Concatenation concatenation, size_t own,
                                               size_t ranks, size_t chunk_bytes);
std::unique_ptr<MpiTask> make_adasum(const MpiEnvironment& environment, const Operation& operation,
                                     Concatenation concatenation);

}  // namespace horovodish
