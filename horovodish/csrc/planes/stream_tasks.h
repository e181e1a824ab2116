// The collectives of the shared-memory plane as sequences of chunks.
#pragma once

#include <memory>
#include <vector>

#include "planes/shared_memory.h"

namespace horovodish {

// The tasks of an operation on rank `own` of `ranks`; none where deciding the operation was all there was to do.
std::vector<std::unique_ptr<StreamTask>> make_stream_tasks(const std::shared_ptr<Operation>& operation, size_t own,
                                                           size_t ranks, size_t chunk_bytes);

}  // namespace horovodish
