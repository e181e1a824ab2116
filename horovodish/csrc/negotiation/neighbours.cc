#include "negotiation/neighbours.h"

#include <algorithm>
#include <string>

#include "memory/clock.h"
#include "negotiation/links/mpi_channel.h"
#include "negotiation/shared_clock.h"
#include "negotiation/tree.h"

namespace horovodish {

Neighbours::Neighbours(const ProcessSetConfig& config, Arena* arena, const PeerDeaths* deaths)
    : config_(config), deaths_(deaths) {
  const TreeNode node = tree_node(config.hosts, config.own);
  if (node.parent) parent_ = edge_to(*node.parent, arena);
  for (const int child : node.children) children_.push_back(edge_to(child, arena));
}

Neighbours::Edge Neighbours::edge_to(int index, Arena* arena) const {
  const WorldRank rank = config_.world_rank(index);
  const auto local = config_.local_rank(index);
  std::unique_ptr<Channel> channel;
  if (local) {
    channel = std::make_unique<SharedMemoryChannel<ControlRing>>(
        arena->control_ring(config_.region, arena->own(), *local),
        arena->control_ring(config_.region, *local, arena->own()), arena->doorbell(*local), config_.sent->within_host);
  } else {
    channel = std::make_unique<MpiChannel>(*config_.mpi, index, config_.mpi->tags.control(), Link::kBlockBytes);
  }
  return {index, rank, std::make_unique<Link>(std::move(channel)), local};
}

std::vector<RankSet> Neighbours::participants() const {
  std::vector<RankSet> participants{RankSet(config_.own_rank())};
  for (const Edge& child : children_) {
    RankSet& ranks = participants.emplace_back();
    for (const int below : subtree(config_.hosts, child.index)) ranks.add(RankSet(config_.world_rank(below)));
  }
  return participants;
}

bool Neighbours::receive(Negotiation& negotiation) {
  bool progressed = false;
  if (parent_) progressed |= receive_from(*parent_, std::nullopt, negotiation);
  for (size_t i = 0; i < children_.size(); ++i) progressed |= receive_from(children_[i], i + 1, negotiation);
  return progressed;
}

// `child`: participant, none for the parent.
bool Neighbours::receive_from(Edge& edge, std::optional<size_t> child, Negotiation& negotiation) {
  if (edge.lost) return false;
  // Asked before reading: by then everything that the peer wrote in its life has arrived.
  const bool dead = edge.local && deaths_->gone(*edge.local);
  const bool progressed = edge.link->advance();
  if (progressed) negotiation.set_now(shared_seconds(Clock::now()));
  while (const auto message = edge.link->receive()) {
    if (child) {
      negotiation.from_child(*child, *message);
    } else {
      negotiation.from_parent(*message);
    }
  }
  const auto& farewell = edge.link->farewell();
  if (!farewell && !dead) return progressed;
  edge.lost = true;
  const std::string died =
      text_of(edge.rank) + " has died: it was killed, it crashed or it called os._exit(). See the end of its output.";
  const Lost lost = farewell ? *farewell : Lost{.loss = Loss::failed, .text = died};
  if (child) {
    negotiation.lost(lost);
  } else {
    negotiation.parent_lost(lost);
  }
  return true;
}

void Neighbours::send(Negotiation& negotiation) {
  const std::string up = negotiation.take_for_parent(), down = negotiation.take_for_children();
  const bool urgent = negotiation.take_urgent();
  if (parent_ && !parent_->lost && !up.empty()) {
    parent_->link->send(up);
    parent_->link->advance();
    if (urgent) parent_->link->nudge();
  }
  if (down.empty()) return;
  for (Edge& child : children_) {
    if (child.lost) continue;
    child.link->send(down);
    child.link->advance();
  }
}

bool Neighbours::has_unsent() const {
  const auto unsent = [](const Edge& edge) { return !edge.lost && edge.link->has_unsent(); };
  return (parent_ && unsent(*parent_)) || std::ranges::any_of(children_, unsent);
}

void Neighbours::nudge_parent() {
  if (parent_ && !parent_->lost) parent_->link->nudge();
}

void Neighbours::nudge_children() {
  for (Edge& child : children_) child.link->nudge();
}

void Neighbours::send_farewell(const Lost& lost) {
  if (parent_ && !parent_->lost) parent_->link->send_farewell(lost);
  for (Edge& child : children_) {
    if (!child.lost) child.link->send_farewell(lost);
  }
}

bool Neighbours::advance_farewell() {
  const auto sent = [](Edge& edge) {
    edge.link->advance();
    while (edge.link->receive()) {
    }
    return edge.lost || edge.link->farewell() ||
           !edge.link->has_unsent();  // a peer that has left takes nothing any more
  };
  bool all = !parent_ || sent(*parent_);
  for (Edge& child : children_) all &= sent(child);
  return all;
}

}  // namespace horovodish
