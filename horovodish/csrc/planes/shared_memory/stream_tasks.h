// The collectives of the shared-memory plane as sequences of chunks.
#pragma once

#include <memory>
#include <vector>

#include "planes/shared_memory/shared_memory.h"

namespace horovodish {

// Where a stream runs.
struct StreamWorld {
  size_t own, ranks;  // of this host
  size_t chunk_bytes;
  const Across* across;  // null when all ranks are on this host
};

// The tasks of an operation; none where deciding the operation was all there was to do. With several hosts only for
// allreduce and broadcast.
std::vector<std::unique_ptr<StreamTask>> make_stream_tasks(const std::shared_ptr<Operation>& operation,
                                                           const StreamWorld& world);

}  // namespace horovodish
