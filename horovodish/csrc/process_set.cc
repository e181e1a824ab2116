#include "process_set.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>

#include "links/mpi_link.h"
#include "links/shared_memory_link.h"
#include "mpi_exit.h"
#include "planes/hierarchical.h"
#include "planes/mpi_ring.h"
#include "planes/shared_memory.h"
#include "planes/solo.h"

namespace horovodish {

namespace {

// Every rank waits and nothing is decided: after this time it is taken for a mistake and reported.
constexpr std::chrono::seconds kStuckAfter{2};
// MPI rings no doorbell. While something is under way the engine looks again after a nap that grows from the first to
// the second value.
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};
// How long the engine of an idle rank sleeps where peers on other hosts cannot wake it, or where it is between others in
// the tree, whose news does not wake a rank that has nothing under way.
constexpr std::chrono::milliseconds kIdleNap{500};

ErrorKind kind_of(Loss loss) { return loss == Loss::stall ? ErrorKind::stalled : ErrorKind::rank_lost; }

double seconds_of(ProcessSet::Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

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
  const auto edge = [&](int index) -> Edge {
    const int rank = config_.ranks[static_cast<size_t>(index)];
    const auto found = std::find(local.begin(), local.end(), index);
    if (found == local.end()) {
      return {rank, std::make_unique<MpiLink>(*config_.mpi, index, config_.generation), std::nullopt};
    }
    const size_t peer = config_.local[static_cast<size_t>(found - local.begin())];
    return {rank, std::make_unique<SharedMemoryLink>(*arena, config_.region, peer), peer};
  };

  const TreeNode node = tree_node(hosts, config_.own);
  std::vector<RankSet> participants{RankSet(world_rank())};
  for (const int child : node.children) {
    participants.push_back(ranks_from(child));
    children_.push_back(edge(child));
  }
  if (node.parent) parent_ = edge(*node.parent);
  if (!parent_ && options_.stall.warning + options_.stall.shutdown > StallInspector::Seconds(0)) {
    stall_.emplace(options_.stall, ranks_from(config_.own));
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
    stream = std::make_unique<SharedMemoryPlane>(*arena, config_.region, config_.local, own, options_.chunk_bytes,
                                                 across, on_complete);
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

// The world ranks of the subtree of `index`.
RankSet ProcessSet::ranks_from(int index) const {
  RankSet ranks;
  for (const int below : subtree(config_.hosts, index)) ranks.add(RankSet(config_.ranks[static_cast<size_t>(below)]));
  return ranks;
}

void ProcessSet::submit(std::shared_ptr<Operation> operation) {
  const Request& request = *operation->request;
  if (request.kind == Kind::join) {
    join_ = std::move(operation);
    negotiation_->join();
    return;
  }
  if (undecided_.contains(request.name)) {
    behind_refusal_[request.name].push_back(std::move(operation));
    return;
  }
  last_news_ = Clock::now();
  last_submitted_ = request.name;
  negotiation_->set_now(seconds_of(last_news_));
  negotiation_->submit(request.name, *operation->signature, operation->absent);
  undecided_.emplace(request.name, std::move(operation));
}

std::optional<std::chrono::nanoseconds> ProcessSet::nap() const {
  using Nanoseconds = std::chrono::nanoseconds;
  if (busy() && plane_ && plane_->needs_polling())
    return std::min(kShortestNap * (1 + fruitless_turns_ / 8), kLongestNap);
  std::optional<Nanoseconds> nap;
  const auto at_most = [&](Nanoseconds limit) { nap = std::min(nap.value_or(limit), limit); };
  if (config_.mpi || (parent_ && !children_.empty())) at_most(kIdleNap);
  if (!stuck_text_.empty()) at_most(kStuckAfter);
  if (stall_ && negotiation_->anything_pending()) at_most(std::chrono::duration_cast<Nanoseconds>(stall_->interval()));
  if (!stall_ && !undecided_.empty() && options_.stall.warning.count() > 0) {
    at_most(std::chrono::duration_cast<Nanoseconds>(options_.stall.warning / 2));
  }
  return nap;
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
      negotiation_->lost(Loss::abort, text);
      negotiation_->parent_lost(Loss::abort, text);
      send_messages();
      apply_decisions();
    }
  }
  if (!progressed) inspect();
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
  if (progressed) negotiation_->set_now(seconds_of(Clock::now()));
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
  const Loss loss = farewell ? farewell->first : Loss::abort;
  const std::string text = farewell ? farewell->second
                                    : "rank " + std::to_string(edge.rank) +
                                          " has died: it was killed or it crashed. See the end of its output.";
  if (child) {
    negotiation_->lost(loss, text);
  } else {
    negotiation_->parent_lost(loss, text);
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
    if (decision.type < Decision::Type::stuck) {
      last_news_ = Clock::now();
      stuck_text_.clear();
    }
    switch (decision.type) {
      case Decision::Type::execute:
        execute(decision);
        break;
      case Decision::Type::fail:
        fail(decision.name, {ErrorKind::mismatch, decision.text});
        break;
      case Decision::Type::refuse:
        fail(decision.name, {kind_of(decision.loss), decision.text});
        break;
      case Decision::Type::lost: {
        const Error error{kind_of(decision.loss), decision.text};
        abandon_undecided(error);
        if (decision.loss >= Loss::failed) do_not_finalize_mpi();
        if (decision.loss >= Loss::abort) {
          abandon_executing(error);
          plane_.reset();
        }
        break;
      }
      case Decision::Type::asked:
        for (Edge& child : children_) child.link->nudge();
        if (options_.stack_signal != 0 && undecided_.empty()) kill(getpid(), options_.stack_signal);
        negotiation_->tell(world_rank(), status());
        break;
      case Decision::Type::told:
        if (stall_) stall_->told(decision.rank, decision.text);
        break;
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

void ProcessSet::fail(const std::string& name, const Error& error) {
  if (const auto found = undecided_.extract(name); !found.empty()) settle_(found.mapped(), &error);
  const auto behind = behind_refusal_.find(name);
  if (behind == behind_refusal_.end()) return;
  auto next = std::move(behind->second.front());
  behind->second.pop_front();
  if (behind->second.empty()) behind_refusal_.erase(behind);
  submit(std::move(next));
}

void ProcessSet::execute(const Decision& decision) {
  const auto found = undecided_.extract(decision.name);
  const auto operation = found.empty() ? neutral(decision.signature) : found.mapped();
  operation->absent = decision.absent;
  operation->contributors = static_cast<int>(config_.ranks.size()) - decision.joined_ranks;
  operation->any_joined = decision.joined_ranks > 0;
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
  const auto behind_refusal = std::exchange(behind_refusal_, {});
  for (const auto& [name, operations] : behind_refusal) {
    for (const auto& operation : operations) settle_(operation, &error);
  }
  if (const auto join = std::exchange(join_, nullptr)) settle_(join, &error);
}

void ProcessSet::abandon_executing(const Error& error) {
  const auto executing = std::exchange(executing_, {});
  for (const auto& operation : executing) settle_(operation, &error);
}

void ProcessSet::leave(bool failed, const std::string& reason, const Error& error) {
  const Loss loss = needed() ? Loss::abort : failed ? Loss::failed : Loss::orderly;
  abandon_undecided(error);
  abandon_executing(error);
  plane_.reset();
  if (parent_ && !parent_->lost) parent_->link->send_farewell(loss, reason);
  for (Edge& child : children_) {
    if (!child.lost) child.link->send_farewell(loss, reason);
  }
}

// Peers may already be executing what this rank has submitted, but never what it has refused.
bool ProcessSet::needed() const {
  const auto submitted = [](const auto& entry) { return entry.second->request->refusal.empty(); };
  return !executing_.empty() || join_ || std::any_of(undecided_.begin(), undecided_.end(), submitted);
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

// While nothing moves: has somebody waited for too long?
void ProcessSet::inspect() {
  const Clock::time_point now = Clock::now();
  if (now < next_inspection_) return;
  if (!stall_) {
    // The root may be idle and asleep, and then does not know that it is waited for.
    const bool waits = parent_ && !parent_->lost && !undecided_.empty() && options_.stall.warning.count() > 0;
    next_inspection_ = now + std::chrono::duration_cast<Clock::duration>(options_.stall.warning / 4);
    if (waits && now - last_news_ > options_.stall.warning / 2) parent_->link->nudge();
    return;
  }
  next_inspection_ = now + std::chrono::duration_cast<Clock::duration>(stall_->interval() / 2);
  switch (stall_->look(now, negotiation_->oldest())) {
    case StallInspector::Action::none:
      return;
    case StallInspector::Action::ask:
      negotiation_->ask();
      break;
    case StallInspector::Action::report:
      std::fprintf(stderr, "horovodish: warning: %s\n", stall_->report(now, negotiation_->describe_pending()).c_str());
      return;
    case StallInspector::Action::give_up:
      negotiation_->lost(Loss::stall, stall_->report(now, negotiation_->describe_pending()));
      break;
  }
  send_messages();
  apply_decisions();
  send_messages();
}

// What this rank is doing, for a report.
std::string ProcessSet::status() const {
  const auto ago = std::to_string(std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - last_news_).count());
  if (join_) return "has joined";
  if (!undecided_.empty()) {
    const auto more = undecided_.size() > 1 ? " and " + std::to_string(undecided_.size() - 1) + " more" : std::string();
    return "waits for '" + undecided_.begin()->first + "'" + more;
  }
  if (last_submitted_.empty()) return "has not submitted anything yet";
  return "has nothing under way; it last submitted '" + last_submitted_ + "', and nothing for " + ago + " s";
}

void ProcessSet::report_stuck() {
  if (Clock::now() - stuck_since_ < kStuckAfter) return;
  std::fprintf(stderr, "horovodish: warning: %s\n", stuck_text_.c_str());
  stuck_text_.clear();
}

}  // namespace horovodish
