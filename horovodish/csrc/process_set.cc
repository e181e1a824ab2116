#include "process_set.h"

#include <algorithm>
#include <cstdio>
#include <exception>

#include "links/mpi_link.h"
#include "links/shared_memory_link.h"
#include "planes/hierarchical.h"
#include "planes/mpi_ring.h"
#include "planes/shared_memory.h"
#include "planes/solo.h"

namespace horovodish {

namespace {

// Children per node of the tree of hosts.
constexpr size_t kArity = 8;
// Every rank waits and nothing is decided: after this time it is taken for a mistake and reported.
constexpr std::chrono::seconds kStuckAfter{2};
// MPI rings no doorbell. While something is under way the engine looks again after a nap that grows from the first to
// the second value.
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};

}  // namespace

ProcessSet::ProcessSet(ProcessSetConfig config, const EngineOptions& options, Arena* arena, const PeerWatch* watch,
                       Settle settle)
    : config_(std::move(config)), options_(options), watch_(watch), settle_(std::move(settle)) {
  connect(arena);
}

void ProcessSet::connect(Arena* arena) {
  const auto& hosts = config_.hosts;
  size_t host = 0;
  while (std::find(hosts[host].begin(), hosts[host].end(), config_.own) == hosts[host].end()) ++host;
  const std::vector<int>& local = hosts[host];
  const auto own = static_cast<size_t>(std::find(local.begin(), local.end(), config_.own) - local.begin());
  const auto world_rank_of = [&](int index) { return config_.ranks[static_cast<size_t>(index)]; };
  const auto local_edge = [&](size_t i) {
    return Edge{world_rank_of(local[i]), std::make_unique<SharedMemoryLink>(*arena, config_.region, config_.local[i]),
                config_.local[i]};
  };

  std::vector<RankSet> participants{RankSet(world_rank())};
  if (own == 0) {
    for (size_t i = 1; i < local.size(); ++i) {
      participants.emplace_back(world_rank_of(local[i]));
      children_.push_back(local_edge(i));
    }
    for (size_t child = host * kArity + 1; child <= (host + 1) * kArity && child < hosts.size(); ++child) {
      participants.push_back(subtree(child));
      children_.push_back(mpi_edge(child));
    }
    if (host > 0) parent_ = mpi_edge((host - 1) / kArity);
  } else {
    parent_ = local_edge(0);
  }
  const auto size = static_cast<int>(config_.ranks.size());
  negotiation_ = std::make_unique<Negotiation>(!parent_, std::move(participants), options_.cache_capacity);

  const auto on_complete = [this](const std::shared_ptr<Operation>& operation) { complete(operation); };
  if (size == 1) {
    plane_ = std::make_unique<SoloPlane>(on_complete);
    return;
  }
  std::unique_ptr<SharedMemoryPlane> stream;
  std::unique_ptr<MpiRingPlane> ring;
  if (hosts.size() < config_.ranks.size()) {  // some host has several ranks
    std::optional<Across> across;
    if (hosts.size() > 1) {
      across.emplace(Across{*config_.mpi, hosts, host, MpiTags(config_.generation), options_.ring_segment_bytes});
    }
    stream = std::make_unique<SharedMemoryPlane>(*arena, config_.region, config_.local, own, across, on_complete);
  }
  if (hosts.size() > 1) {
    ring = std::make_unique<MpiRingPlane>(*config_.mpi, config_.own, size, config_.generation,
                                          options_.ring_segment_bytes, on_complete);
  }
  if (stream && ring) {
    plane_ = std::make_unique<HierarchicalPlane>(std::move(stream), std::move(ring));
  } else if (stream) {
    plane_ = std::move(stream);
  } else {
    plane_ = std::move(ring);
  }
}

// The ranks of host `host` and of the hosts below it in the tree.
RankSet ProcessSet::subtree(size_t host) const {
  RankSet ranks;
  for (const int index : config_.hosts[host]) ranks.add(RankSet(config_.ranks[static_cast<size_t>(index)]));
  for (size_t child = host * kArity + 1; child <= (host + 1) * kArity && child < config_.hosts.size(); ++child) {
    ranks.add(subtree(child));
  }
  return ranks;
}

ProcessSet::Edge ProcessSet::mpi_edge(size_t host) const {
  const int peer = config_.hosts[host][0];
  return {config_.ranks[static_cast<size_t>(peer)], std::make_unique<MpiLink>(*config_.mpi, peer, config_.generation),
          std::nullopt};
}

void ProcessSet::submit(std::shared_ptr<Operation> operation) {
  const Request& request = *operation->request;
  if (request.kind == Kind::join) {
    join_ = std::move(operation);
    negotiation_->join();
    return;
  }
  negotiation_->submit(request.name, *operation->signature, operation->absent);
  undecided_.emplace(request.name, std::move(operation));
}

std::optional<std::chrono::nanoseconds> ProcessSet::nap() const {
  if (busy() && plane_ && plane_->needs_polling()) {
    return std::min(kShortestNap * (1 + fruitless_turns_ / 8), kLongestNap);
  }
  if (!stuck_text_.empty()) return kStuckAfter;
  return std::nullopt;
}

bool ProcessSet::turn() {
  bool progressed = false;
  if (parent_) progressed |= read(*parent_, std::nullopt);
  for (size_t i = 0; i < children_.size(); ++i) progressed |= read(children_[i], i + 1);
  send_messages();
  apply_decisions();
  if (plane_) {
    try {
      progressed |= plane_->advance() == Progress::progressed;
    } catch (const std::exception& error) {
      const std::string text = "rank " + std::to_string(world_rank()) + ": " + error.what();
      negotiation_->lost(true, text);
      negotiation_->parent_lost(true, text);
      send_messages();
      apply_decisions();
    }
  }
  if (!stuck_text_.empty()) report_stuck();
  fruitless_turns_ = progressed ? 0 : fruitless_turns_ + 1;
  return progressed;
}

// Reads what a neighbour has to say, last of all that it has gone. `child`: participant, none for the parent.
bool ProcessSet::read(Edge& edge, std::optional<size_t> child) {
  if (edge.lost) return false;
  // Asked before reading: whatever the peer wrote in its life is there by now.
  const bool dead = edge.local && watch_->gone(*edge.local);
  const bool progressed = edge.link->advance();
  while (const auto message = edge.link->receive()) {
    if (child) {
      negotiation_->from_child(*child, *message);
    } else {
      negotiation_->from_parent(*message);
    }
  }
  const auto& farewell = edge.link->farewell();
  if (!farewell && !dead) return progressed;
  edge.lost = true;
  const bool abort = !farewell || farewell->first;
  const std::string text = farewell ? farewell->second
                                    : "rank " + std::to_string(edge.rank) +
                                          " has died: it was killed or it crashed. See the end of its output.";
  if (child) {
    negotiation_->lost(abort, text);
  } else {
    negotiation_->parent_lost(abort, text);
  }
  return true;
}

void ProcessSet::send_messages() {
  const std::string up = negotiation_->take_for_parent(), down = negotiation_->take_for_children();
  if (parent_ && !parent_->lost && !up.empty()) {
    parent_->link->send(up);
    parent_->link->advance();
  }
  if (down.empty()) return;
  for (Edge& child : children_) {
    if (child.lost) continue;
    child.link->send(down);
    child.link->advance();
  }
}

void ProcessSet::apply_decisions() {
  for (const Decision& decision : negotiation_->take_decisions()) {
    if (decision.type != Decision::Type::stuck) stuck_text_.clear();
    switch (decision.type) {
      case Decision::Type::execute:
        execute(decision);
        break;
      case Decision::Type::fail:
      case Decision::Type::refuse: {
        const auto found = undecided_.extract(decision.name);
        if (found.empty()) break;
        const bool lost = decision.type == Decision::Type::refuse;
        const Error error{lost ? ErrorKind::rank_lost : ErrorKind::mismatch, decision.text};
        settle_(found.mapped(), &error);
        break;
      }
      case Decision::Type::lost:
      case Decision::Type::abort: {
        const Error error{ErrorKind::rank_lost, decision.text};
        abandon_undecided(error);
        if (decision.type == Decision::Type::abort) {
          abandon_executing(error);
          plane_.reset();
        }
        break;
      }
      case Decision::Type::stuck:
        stuck_text_ = decision.text;
        stuck_since_ = Clock::now();
        break;
      case Decision::Type::join_done: {
        const auto join = std::exchange(join_, nullptr);
        join->handle->last_joined = decision.rank;
        settle_(join, nullptr);
        break;
      }
    }
  }
}

void ProcessSet::execute(const Decision& decision) {
  const auto found = undecided_.extract(decision.name);
  const auto operation = found.empty() ? neutral(decision.signature) : found.mapped();
  operation->absent = decision.absent;
  operation->contributors = static_cast<int>(config_.ranks.size()) - decision.joined_ranks;
  const auto root = std::find(config_.ranks.begin(), config_.ranks.end(), operation->request->root);
  operation->root = static_cast<int>(root - config_.ranks.begin());
  executing_.insert(operation);
  plane_->start(operation);
}

// The part of a rank that has joined.
std::shared_ptr<Operation> ProcessSet::neutral(const std::string& signature) const {
  auto operation = std::make_shared<Operation>(*join_);
  const auto request = std::make_shared<const Request>(Request::decode(signature));
  operation->request = request;
  operation->reported = false;
  operation->handle = std::make_shared<Handle>(0);
  operation->buffers.assign(request->members.size(), {});
  if (request->kind == Kind::alltoall) {
    for (Buffer& buffer : operation->buffers) buffer.splits.assign(config_.ranks.size(), 0);
  }
  return operation;
}

void ProcessSet::complete(const std::shared_ptr<Operation>& operation) {
  executing_.erase(operation);
  settle_(operation, nullptr);
}

void ProcessSet::abandon_undecided(const Error& error) {
  const auto undecided = std::exchange(undecided_, {});
  for (const auto& [name, operation] : undecided) settle_(operation, &error);
  if (const auto join = std::exchange(join_, nullptr)) settle_(join, &error);
}

void ProcessSet::abandon_executing(const Error& error) {
  const auto executing = std::exchange(executing_, {});
  for (const auto& operation : executing) settle_(operation, &error);
}

void ProcessSet::leave(bool failed, const std::string& reason, const Error& error) {
  failed |= busy();  // peers may already be executing what this rank gives up
  abandon_undecided(error);
  abandon_executing(error);
  plane_.reset();
  if (parent_ && !parent_->lost) parent_->link->send_farewell(failed, reason);
  for (Edge& child : children_) {
    if (!child.lost) child.link->send_farewell(failed, reason);
  }
}

bool ProcessSet::advance_farewell() {
  const auto sent = [](Edge& edge) {
    edge.link->advance();
    return edge.lost || edge.link->all_sent();
  };
  bool all = !parent_ || sent(*parent_);
  for (Edge& child : children_) all &= sent(child);
  return all;
}

void ProcessSet::report_stuck() {
  if (Clock::now() - stuck_since_ < kStuckAfter) return;
  std::fprintf(stderr, "horovodish: warning: %s\n", stuck_text_.c_str());
  stuck_text_.clear();
}

}  // namespace horovodish
