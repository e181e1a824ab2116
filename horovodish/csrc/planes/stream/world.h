// The ranks of a process set as a stream sees them: on this host and on others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "negotiation/process_set_config.h"
#include "planes/mpi/schedule_run.h"
#include "planes/shards.h"

namespace horovodish {

struct StreamWorld {
  const ProcessSetConfig& config;
  const std::vector<std::vector<int>>& hosts = config.hosts;
  size_t host = config.own_host();  // of this rank
  size_t own =
      static_cast<size_t>(std::ranges::find(hosts[host], config.own) - hosts[host].begin());  // its place there
  size_t ranks = hosts[host].size();  // of this host
  HostShards shards{hosts, abi::MpiTags::kExchanges};
  // For one operation. The ranks of a host exchange chunks of this size in slots that all of them see. 0: every rank is
  // a host, so an operation is one chunk, in memory of its own.
  size_t chunk_bytes = 0, slot_bytes = 0;
  size_t segment_bytes = 0;  // of a message between hosts

  bool in_slots() const { return chunk_bytes > 0; }
  bool several_hosts() const { return hosts.size() > 1; }
  size_t size() const { return config.ranks.size(); }
  size_t rank_at(size_t host_index, size_t place) const { return static_cast<size_t>(hosts[host_index][place]); }
  size_t own_rank() const { return static_cast<size_t>(config.own); }
  // Counts bytes that this rank has put into its slot.
  void put(size_t bytes) const {
    if (ranks > 1) config.sent->within_host += bytes;
  }
  // Elements in a chunk of a tensor, or of several, that has `count` of `item_bytes`.
  size_t chunk_of(size_t count, size_t item_bytes) const {
    return in_slots() ? chunk_bytes / item_bytes : std::max<size_t>(count, 1);
  }

  // One rank of each host, in the order of hosts. `choose(host)`: its place among the ranks of that host. `sequence`:
  // the number of the chunk that they exchange. `tag`: from 0; transfers between the same two ranks at the same time
  // need different ones.
  template <class Choose>
  MpiEnvironment one_of_each_host(uint64_t sequence, size_t tag, Choose choose) const {
    std::vector<int> peers;
    for (size_t i = 0; i < hosts.size(); ++i) peers.push_back(hosts[i][choose(i)]);
    return {*config.mpi, std::move(peers), static_cast<int>(host), config.mpi->tags.exchange(sequence, tag),
            segment_bytes};
  }
  MpiEnvironment everybody(uint64_t sequence, size_t tag = 0) const {
    std::vector<int> peers(size());
    std::iota(peers.begin(), peers.end(), 0);
    return {*config.mpi, std::move(peers), config.own, config.mpi->tags.exchange(sequence, tag), segment_bytes};
  }
};

}  // namespace horovodish
