// Allgather and alltoall as sequences of chunks.
#pragma once

#include <memory>

#include "planes/stream/stream.h"

namespace horovodish {

std::shared_ptr<StreamTask> make_rows_task(const std::shared_ptr<Operation>& operation, const StreamWorld& world);

}  // namespace horovodish
