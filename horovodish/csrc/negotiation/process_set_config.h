// The configuration of a process set.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "abi/mpi.h"
#include "negotiation/stall.h"
#include "negotiation/world_rank.h"

namespace horovodish {

// What this rank has sent so far, in all process sets. Only the driving thread counts and reads it.
struct SentBytes {
  std::vector<uint64_t> to;  // by rank of the world, over MPI
  uint64_t within_host = 0;  // put into memory that the ranks of this host share
};

struct ProcessSetConfig {
  int id = 0;                           // 0: the global set
  std::vector<WorldRank> ranks;         // in the order of their ranks within the set
  int own = 0;                          // this rank's index in `ranks`
  std::vector<std::vector<int>> hosts;  // indices by host, each list ascending, the hosts by their first index
  // If several ranks are on this host:
  std::vector<size_t> local;  // their local ranks in the arena, in the order of this host's list
  size_t region = 0;          // of the arena, equal on all of them
  // If there are several hosts:
  std::optional<abi::Mpi> mpi;  // with a communicator of exactly these ranks
  SentBytes* sent = nullptr;    // of the engine

  WorldRank world_rank(int index) const { return ranks[static_cast<size_t>(index)]; }
  WorldRank own_rank() const { return world_rank(own); }
  // The local rank in the arena of the rank with this index; none if it is on another host.
  std::optional<size_t> local_rank(int index) const {
    const std::vector<int>& indices = hosts[own_host()];
    const auto found = std::ranges::find(indices, index);
    if (found == indices.end()) return std::nullopt;
    return local[static_cast<size_t>(found - indices.begin())];
  }
  // This rank's place in `hosts`.
  size_t own_host() const {
    const auto holds_own = [this](const auto& host) { return std::binary_search(host.begin(), host.end(), own); };
    return static_cast<size_t>(std::ranges::find_if(hosts, holds_own) - hosts.begin());
  }
};

struct EngineOptions {
  size_t chunk_bytes = 0;             // of the shared-memory plane, where a request does not say otherwise
  size_t ring_segment_bytes = 0;      // of a message between hosts, in the same way
  size_t cache_capacity = 0;          // entries of the response cache
  // How long a waiting caller spins before it sleeps; none: depends on the cost of a wake-up.
  std::optional<std::chrono::microseconds> spin;
  StallInspector::Options stall;
  std::string plane;        // the setting of that name: how bytes move
  bool shared_gpu = false;  // several ranks may use one GPU
  int stack_signal = 0;  // the signal that makes this process print its Python stacks when a rank lags; 0: none
  bool horovods_gradients = false;  // collectives have Horovod's gradients, for programs that need them
  bool averages_over_size = false;  // an averaging allreduce divides by the number of ranks, joined ones among them
};

}  // namespace horovodish
