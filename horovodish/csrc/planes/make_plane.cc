#include "planes/make_plane.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "planes/nccl/nccl.h"
#include "planes/router.h"
#include "planes/stream/stream.h"

namespace horovodish {

namespace {

std::unique_ptr<Plane> make_host_plane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena,
                                       const Plane::OnComplete& on_complete) {
  const auto& hosts = config.hosts;
  const size_t host = config.own_host();
  const auto own = std::find(hosts[host].begin(), hosts[host].end(), config.own) - hosts[host].begin();
  std::optional<StreamPlane::Shared> shared;
  if (hosts.size() < config.ranks.size()) shared.emplace(StreamPlane::Shared{*arena, config.region, config.local});
  std::optional<OtherHosts> others;
  if (hosts.size() > 1) {
    others.emplace(
        OtherHosts{*config.mpi, hosts, host, config.own, MpiTags(config.generation), options.ring_segment_bytes});
  }
  return std::make_unique<StreamPlane>(std::move(shared), static_cast<size_t>(own), options.chunk_bytes,
                                       std::move(others), on_complete);
}

}  // namespace

std::unique_ptr<Plane> make_plane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena,
                                  LaunchOrder& order, LaunchedOperations& launched,
                                  const Plane::OnComplete& on_complete, const Plane::OnRefuse& on_refuse) {
  auto host = make_host_plane(config, options, arena, on_complete);
  NcclPlaneConfig nccl{config.id, config.own, config.ranks, options.plane == "nccl", options.shared_gpu};
  auto device = std::make_unique<NcclPlane>(std::move(nccl), *host, order, launched, on_complete, on_refuse);
  return std::make_unique<Router>(std::move(host), std::move(device),
                                  [](const Request& request) { return !request.on_host(); });
}

}  // namespace horovodish
