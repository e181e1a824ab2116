// The collectives as sequences of chunks.
#pragma once

#include <memory>
#include <vector>

#include "planes/stream/stream.h"

namespace horovodish {

// The tasks of an operation; none where deciding the operation was all there was to do.
std::vector<std::shared_ptr<StreamTask>> make_stream_tasks(const std::shared_ptr<Operation>& operation,
                                                           const StreamWorld& world);

// What remains of an operation of a rank that is alone: copies and scaling.
void carry_out_alone(Operation& operation);

}  // namespace horovodish
