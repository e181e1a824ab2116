#include "planes/make_plane.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "planes/by_device.h"
#include "planes/hierarchical.h"
#include "planes/mpi/mpi_ring.h"
#include "planes/shared_memory/shared_memory.h"
#include "planes/solo.h"

namespace horovodish {

namespace {

std::unique_ptr<Plane> make_host_plane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena,
                                       const Plane::OnComplete& on_complete) {
  const auto& hosts = config.hosts;
  const auto size = static_cast<int>(config.ranks.size());
  if (size == 1) return std::make_unique<SoloPlane>(on_complete);
  std::unique_ptr<SharedMemoryPlane> stream;
  std::unique_ptr<MpiRingPlane> ring;
  if (hosts.size() < config.ranks.size()) {  // some host has several ranks
    const size_t host = config.own_host();
    const auto own = std::find(hosts[host].begin(), hosts[host].end(), config.own);
    std::optional<Across> across;
    if (hosts.size() > 1) {
      across.emplace(Across{*config.mpi, hosts, host, MpiTags(config.generation), options.ring_segment_bytes});
    }
    stream = std::make_unique<SharedMemoryPlane>(*arena, config.region, config.local,
                                                 static_cast<size_t>(own - hosts[host].begin()), options.chunk_bytes,
                                                 across, on_complete);
  }
  if (hosts.size() > 1) {
    ring = std::make_unique<MpiRingPlane>(*config.mpi, config.own, size, config.generation, options.ring_segment_bytes,
                                          on_complete);
  }
  if (stream && ring) return std::make_unique<HierarchicalPlane>(std::move(stream), std::move(ring));
  if (stream) return stream;
  return ring;
}

}  // namespace

std::unique_ptr<Plane> make_plane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena,
                                  LaunchOrder& order, const Plane::OnComplete& on_complete,
                                  const Plane::OnRefuse& on_refuse) {
  auto host = make_host_plane(config, options, arena, on_complete);
  NcclConfig nccl{config.id, config.own, config.ranks, options.plane == "nccl", options.shared_gpu};
  auto device = std::make_unique<NcclPlane>(std::move(nccl), *host, order, on_complete, on_refuse);
  return std::make_unique<PlaneByDevice>(std::move(host), std::move(device));
}

}  // namespace horovodish
