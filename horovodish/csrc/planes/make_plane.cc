#include "planes/make_plane.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "planes/nccl/nccl.h"
#include "planes/stream/stream.h"

namespace horovodish {

namespace {

std::unique_ptr<Plane> make_host_plane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena,
                                       const Plane::OnComplete& on_complete) {
  const size_t host = config.own_host();
  const auto& own_host = config.hosts[host];
  const auto place = std::find(own_host.begin(), own_host.end(), config.own) - own_host.begin();
  std::optional<StreamPlane::Shared> shared;
  if (config.hosts.size() < config.ranks.size())
    shared.emplace(StreamPlane::Shared{*arena, config.region, config.local});
  HostLayout layout{config.hosts, host, static_cast<size_t>(place), config.mpi ? &*config.mpi : nullptr,
                    options.ring_segment_bytes};
  return std::make_unique<StreamPlane>(std::move(shared), options.chunk_bytes, std::move(layout), on_complete);
}

}  // namespace

std::unique_ptr<Plane> make_plane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena,
                                  LaunchOrder& order, LaunchedOperations& launched,
                                  const Plane::OnComplete& on_complete, const Plane::OnRefuse& on_refuse) {
  return std::make_unique<NcclPlane>(config, options, make_host_plane(config, options, arena, on_complete), order,
                                     launched, on_complete, on_refuse);
}

}  // namespace horovodish
