#include "planes/make_plane.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "planes/mpi/mpi_ring.h"
#include "planes/nccl/nccl.h"
#include "planes/router.h"
#include "planes/shared_memory/shared_memory.h"
#include "planes/solo.h"

namespace horovodish {

namespace {

// Within a host, chunks of fewer segments would travel whole: nothing is combined or collected meanwhile.
constexpr size_t kSegmentsOfChunk = 4;

// On several hosts with several ranks each. Allreduce and broadcast go through the stream of the shared-memory plane, in which
// every local rank drives the ring of its own shard. Adasum needs every rank's values in the end, and other collectives send
// different data to different ranks: they gain nothing from a detour through a neighbour.
bool goes_straight_between_all_ranks(const Request& request) {
  return request.kind != Kind::broadcast && (request.kind != Kind::allreduce || request.op == ReduceOp::adasum);
}

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
      const size_t segment_bytes = std::min(options.ring_segment_bytes, options.chunk_bytes / kSegmentsOfChunk);
      across.emplace(Across{*config.mpi, hosts, host, MpiTags(config.generation), segment_bytes});
    }
    stream = std::make_unique<SharedMemoryPlane>(*arena, config.region, config.local,
                                                 static_cast<size_t>(own - hosts[host].begin()), options.chunk_bytes,
                                                 across, on_complete);
  }
  if (hosts.size() > 1) {
    ring = std::make_unique<MpiRingPlane>(*config.mpi, config.own, size, config.generation, options.ring_segment_bytes,
                                          on_complete);
  }
  if (stream && ring) {
    return std::make_unique<Router>(std::move(stream), std::move(ring), goes_straight_between_all_ranks);
  }
  if (stream) return stream;
  return ring;
}

}  // namespace

std::unique_ptr<Plane> make_plane(const ProcessSetConfig& config, const EngineOptions& options, Arena* arena,
                                  LaunchOrder& order, LaunchedOperations& launched,
                                  const Plane::OnComplete& on_complete, const Plane::OnRefuse& on_refuse) {
  auto host = make_host_plane(config, options, arena, on_complete);
  NcclConfig nccl{config.id, config.own, config.ranks, options.plane == "nccl", options.shared_gpu};
  auto device = std::make_unique<NcclPlane>(std::move(nccl), *host, order, launched, on_complete, on_refuse);
  return std::make_unique<Router>(std::move(host), std::move(device),
                                  [](const Request& request) { return !request.on_host(); });
}

}  // namespace horovodish
