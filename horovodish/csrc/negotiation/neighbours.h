// A rank's edges in the negotiation tree of a process set. They carry the messages of its Negotiation, and tell it when
// a neighbour has gone.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "memory/arena.h"
#include "memory/peer_deaths.h"
#include "negotiation/links/link.h"
#include "negotiation/negotiation.h"
#include "negotiation/process_set_config.h"
#include "negotiation/rank_set.h"

namespace horovodish {

class Neighbours {
 public:
  // `arena` and `deaths` may be null if this rank is alone on its host. They and `config` outlive this object.
  Neighbours(const ProcessSetConfig& config, Arena* arena, const PeerDeaths* deaths);

  // The negotiation's place in the tree: whether this rank is the root, and the ranks of itself and of its children's
  // subtrees.
  bool at_root() const { return edges_.empty() || edges_[0].child; }
  std::vector<RankSet> participants() const;
  bool between_others() const { return !at_root() && edges_.size() > 1; }

  // Hands on arrived messages; the last one from a neighbour says that it has gone. Returns true if anything has moved.
  bool receive(Negotiation& negotiation);
  void send(Negotiation& negotiation);
  bool has_unsent() const;
  // Wakes the engine of a neighbour on this host even if it has nothing under way.
  void nudge_parent();
  void nudge_children();
  // Sends the last message of this rank. Call advance_farewell() until it returns true.
  void send_farewell(const Lost& lost);
  bool advance_farewell();

  WorldRank parent_rank() const { return edges_[0].rank; }  // not at the root

 private:
  struct Edge {
    std::optional<size_t> child;  // participant of the negotiation; none: the parent
    int index;  // within the set
    WorldRank rank;
    std::unique_ptr<Link> link;
    std::optional<size_t> local;  // local rank in the arena if the edge is on this host
    bool lost = false;
  };

  void add_edge(std::optional<size_t> child, int index, Arena* arena);
  bool receive_from(Edge& edge, Negotiation& negotiation);

  const ProcessSetConfig& config_;
  const PeerDeaths* const deaths_;
  std::vector<Edge> edges_;  // the parent, if there is one, and then the children
};

}  // namespace horovodish
