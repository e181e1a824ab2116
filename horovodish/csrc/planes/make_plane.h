// The plane of a process set: which ones it is made of follows from where the ranks are.
#pragma once

#include <memory>

#include "memory/arena.h"
#include "negotiation/process_set_config.h"
#include "planes/nccl/launch_order.h"
#include "planes/nccl/launched_operations.h"
#include "planes/plane.h"

namespace horovodish {

// `arena` may be null where no host has several ranks. It, `config`, `order` and `launched` outlive the plane.
std::unique_ptr<Plane> make_plane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena,
                                  LaunchOrder& order, LaunchedOperations& launched,
                                  const Plane::OnComplete& on_complete, const Plane::OnRefuse& on_refuse);

}  // namespace horovodish
