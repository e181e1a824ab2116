// The ranks of a process set as a stream sees them: on this host and on others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "planes/mpi/schedule_run.h"
#include "planes/shards.h"

namespace horovodish {

// Where the ranks of a process set are, and how the hosts reach each other.
struct HostLayout {
  std::vector<std::vector<int>> hosts;  // ranks of the process set by host
  size_t host, place;                   // of this rank: its host, and its place among the ranks there
  const abi::Mpi* mpi;                  // null where there is one host only
  size_t segment_bytes;                 // of a message between hosts
  HostShards shards{hosts, abi::MpiTags::kExchanges};
};

struct StreamWorld {
  const HostLayout& layout;  // the plane's
  // The ranks of a host exchange chunks of this size in slots that all of them see. 0: every rank is a host, so an operation
  // is one chunk, in memory of its own.
  size_t chunk_bytes = 0, slot_bytes = 0;
  size_t segment_bytes = 0;  // of a message between hosts
  const std::vector<std::vector<int>>& hosts = layout.hosts;
  size_t own = layout.place, ranks = hosts[layout.host].size();  // of this host

  bool in_slots() const { return chunk_bytes > 0; }
  bool several_hosts() const { return hosts.size() > 1; }
  size_t size() const {
    return std::accumulate(hosts.begin(), hosts.end(), size_t{0},
                           [](size_t sum, const auto& of_host) { return sum + of_host.size(); });
  }
  size_t rank_at(size_t host, size_t place) const { return static_cast<size_t>(hosts[host][place]); }
  size_t own_rank() const { return rank_at(layout.host, own); }
  // Elements in a chunk of a tensor, or of several, that has `count` of `item_bytes`.
  size_t chunk_of(size_t count, size_t item_bytes) const {
    return in_slots() ? chunk_bytes / item_bytes : std::max<size_t>(count, 1);
  }

  // One rank of each host, in the order of hosts: `choose(host)` is its place among the ranks of that host. `sequence`: of the
  // chunk that they exchange. `tag`: from 0, different for what travels between the same two ranks at once.
  template <class Choose>
  MpiEnvironment one_of_each_host(uint64_t sequence, size_t tag, Choose choose) const {
    std::vector<int> peers;
    for (size_t i = 0; i < hosts.size(); ++i) peers.push_back(hosts[i][choose(i)]);
    return {*layout.mpi, std::move(peers), static_cast<int>(layout.host), layout.mpi->tags.exchange(sequence, tag),
            segment_bytes};
  }
  MpiEnvironment everybody(uint64_t sequence, size_t tag = 0) const {
    std::vector<int> peers(size());
    std::iota(peers.begin(), peers.end(), 0);
    return {*layout.mpi, std::move(peers), static_cast<int>(own_rank()), layout.mpi->tags.exchange(sequence, tag),
            segment_bytes};
  }
};

}  // namespace horovodish
