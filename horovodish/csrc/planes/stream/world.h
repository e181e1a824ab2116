// The ranks of a process set as a stream sees them: on this host and on others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "planes/mpi/schedule_run.h"
#include "planes/shards.h"

namespace horovodish {

// How the ranks of several hosts reach each other.
struct OtherHosts {
  const abi::Mpi& mpi;
  std::vector<std::vector<int>> hosts;  // ranks of the process set by host
  size_t host;                          // this one
  int own;                              // this rank
  MpiTags tags;
  size_t segment_bytes;
  HostShards shards{hosts, MpiTags::kExchanges};

  size_t ranks() const {
    return std::accumulate(hosts.begin(), hosts.end(), size_t{0},
                           [](size_t sum, const auto& ranks) { return sum + ranks.size(); });
  }
};

struct StreamWorld {
  size_t own = 0, ranks = 1;  // of this host
  // The ranks of a host exchange chunks of this size in slots that all of them see. 0: every rank is a host, so an operation
  // is one chunk, in memory of its own.
  size_t chunk_bytes = 0, slot_bytes = 0;
  size_t segment_bytes = 0;  // of a message between hosts
  const OtherHosts* others = nullptr;  // null when all ranks are on this host

  bool in_slots() const { return chunk_bytes > 0; }
  size_t size() const { return others == nullptr ? ranks : others->ranks(); }
  // Elements in a chunk of a tensor, or of several, that has `count` of `item_bytes`.
  size_t chunk_of(size_t count, size_t item_bytes) const {
    return in_slots() ? chunk_bytes / item_bytes : std::max<size_t>(count, 1);
  }

  // One rank of each host, in the order of hosts: `choose(host)` is its place among the ranks of that host. `sequence`: of the
  // chunk that they exchange. `tag`: from 0, different for what travels between the same two ranks at once.
  template <class Choose>
  MpiEnvironment one_of_each_host(uint64_t sequence, size_t tag, Choose choose) const {
    std::vector<int> peers;
    for (size_t i = 0; i < others->hosts.size(); ++i) peers.push_back(others->hosts[i][choose(i)]);
    return {others->mpi, std::move(peers), static_cast<int>(others->host), others->tags.exchange(sequence, tag),
            segment_bytes};
  }
  MpiEnvironment everybody(uint64_t sequence, size_t tag = 0) const {
    std::vector<int> peers(size());
    std::iota(peers.begin(), peers.end(), 0);
    return {others->mpi, std::move(peers), others->own, others->tags.exchange(sequence, tag),
            in_slots() ? others->segment_bytes : segment_bytes};
  }
};

}  // namespace horovodish
