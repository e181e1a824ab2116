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
  if (node.parent) add_edge(std::nullopt, *node.parent, arena);
  for (size_t i = 0; i < node.children.size(); ++i) add_edge(i + 1, node.children[i], arena);
}

void Neighbours::add_edge(std::optional<size_t> child, int index, Arena* arena) {
  const auto local = config_.local_rank(index);
  std::unique_ptr<Channel> channel;
  if (local) {
    channel = std::make_unique<SharedMemoryChannel<ControlRing>>(
        arena->control_ring(config_.region, arena->own(), *local),
        arena->control_ring(config_.region, *local, arena->own()), arena->doorbell(*local), config_.sent->within_host);
  } else {
    channel = std::make_unique<MpiChannel>(*config_.mpi, index, config_.mpi->tags.control(), Link::kBlockBytes);
  }
  edges_.push_back({child, index, config_.world_rank(index), std::make_unique<Link>(std::move(channel)), local});
}

std::vector<RankSet> Neighbours::participants() const {
  std::vector<RankSet> participants{RankSet(config_.own_rank())};
  for (const Edge& edge : edges_) {
    if (!edge.child) continue;
    RankSet& ranks = participants.emplace_back();
    for (const int below : subtree(config_.hosts, edge.index)) ranks.add(RankSet(config_.world_rank(below)));
  }
  return participants;
}

bool Neighbours::receive(Negotiation& negotiation) {
  bool progressed = false;
  for (Edge& edge : edges_) progressed |= receive_from(edge, negotiation);
  return progressed;
}

bool Neighbours::receive_from(Edge& edge, Negotiation& negotiation) {
  if (edge.lost) return false;
  // Asked before reading: by then everything that the peer wrote in its life has arrived.
  const bool dead = edge.local && deaths_->gone(*edge.local);
  const bool progressed = edge.link->advance();
  if (progressed) negotiation.set_now(shared_seconds(Clock::now()));
  while (const auto message = edge.link->receive()) {
    if (edge.child) {
      negotiation.from_child(*edge.child, *message);
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
  if (edge.child) {
    negotiation.lost(lost);
  } else {
    negotiation.parent_lost(lost);
  }
  return true;
}

void Neighbours::send(Negotiation& negotiation) {
  const std::string up = negotiation.take_for_parent(), down = negotiation.take_for_children();
  const bool urgent = negotiation.take_urgent();
  for (Edge& edge : edges_) {
    const std::string& message = edge.child ? down : up;
    if (edge.lost || message.empty()) continue;
    edge.link->send(message);
    edge.link->advance();
    if (urgent && !edge.child) edge.link->nudge();
  }
}

bool Neighbours::has_unsent() const {
  return std::ranges::any_of(edges_, [](const Edge& edge) { return !edge.lost && edge.link->has_unsent(); });
}

void Neighbours::nudge_parent() {
  if (!at_root() && !edges_[0].lost) edges_[0].link->nudge();
}

void Neighbours::nudge_children() {
  for (Edge& edge : edges_) {
    if (edge.child) edge.link->nudge();
  }
}

void Neighbours::send_farewell(const Lost& lost) {
  for (Edge& edge : edges_) {
    if (!edge.lost) edge.link->send_farewell(lost);
  }
}

bool Neighbours::advance_farewell() {
  bool all_sent = true;
  for (Edge& edge : edges_) {
    edge.link->advance();
    while (edge.link->receive()) {
    }
    // A peer that has left takes nothing any more.
    all_sent &= edge.lost || edge.link->farewell() || !edge.link->has_unsent();
  }
  return all_sent;
}

}  // namespace horovodish
