// The operations of a stream as sequences of chunks.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "planes/fusion.h"
#include "planes/mpi/coded_allreduce.h"
#include "planes/stream/stream.h"

namespace horovodish {

// Empty for an operation that is done as soon as all ranks have submitted it. There are several ranks.
std::vector<std::shared_ptr<StreamTask>> make_stream_tasks(const std::shared_ptr<Operation>& operation,
                                                           const StreamWorld& world);
// An allreduce if `values.begins` is empty, otherwise a reducescatter. `packing_scale`: multiplies this rank's values.
// `coding`: the codec of an allreduce between hosts.
std::shared_ptr<StreamTask> make_reduce_task(ReduceOp op, const Scaling& scaling, double packing_scale,
                                             ScatterLayout values, const StreamWorld& world,
                                             std::optional<Coding> coding = std::nullopt);
// One dtype of an allreduce whose op is Adasum.
std::shared_ptr<StreamTask> make_adasum_task(const Operation& operation, Concatenation concatenation,
                                             const StreamWorld& world);
// An allgather or an alltoall.
std::shared_ptr<StreamTask> make_rows_task(const std::shared_ptr<Operation>& operation, const StreamWorld& world);

// Carries out an operation of a rank that is alone.
void carry_out_alone(Operation& operation);

}  // namespace horovodish
