// Adasum as a sequence of chunks within a host, and between hosts.
#pragma once

#include <memory>

#include "planes/fusion.h"
#include "planes/stream/stream.h"

namespace horovodish {

// One dtype of an allreduce whose op is Adasum. There are several ranks.
std::shared_ptr<StreamTask> make_adasum_task(const Operation& operation, Concatenation concatenation,
                                             const StreamWorld& world);

}  // namespace horovodish
