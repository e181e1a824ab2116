#include "process_set.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>

#include "links/mpi_link.h"
#include "links/shared_memory_link.h"
#include "mpi_exit.h"
#include "planes/by_device.h"
#include "planes/hierarchical.h"
#include "planes/mpi_ring.h"
#include "planes/shared_memory.h"
#include "planes/solo.h"

namespace horovodish {

namespace {

// Every rank waits and nothing is decided: after this time it is taken for a mistake and reported.
constexpr std::chrono::seconds kStuckAfter{2};
// MPI rings no doorbell. While something is under way the engine looks again after a nap of 1 / kNapPart of the time
// that it has waited, within the two limits: a wait gets longer by that part at most.
constexpr int kNapPart = 2;
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};
// MPI may report a peer's death before its last words, or those of the rank that knows why, have arrived.
constexpr std::chrono::seconds kNewsTime{3};
// How long the engine of an idle rank sleeps where peers on other hosts cannot wake it, or where it is between others
// in the tree, whose news does not wake a rank that has nothing under way.
constexpr std::chrono::milliseconds kIdleNap{500};
// How often the engine looks whether what it has launched on the GPU has failed.
constexpr std::chrono::milliseconds kWatchNap{100};
// How long a rank that leaves waits for what its GPU still does. Peers may need it that have computed for longer.
constexpr std::chrono::seconds kDrainLimit{10};
constexpr int kClockReadings = 9;

ErrorKind kind_of(Loss loss) { return loss == Loss::stall ? ErrorKind::stalled : ErrorKind::rank_lost; }

void warn(const std::string& text) { std::fprintf(stderr, "horovodish: warning: %s\n", text.c_str()); }

// The time of day at the origin of the steady clock, from the reading that was disturbed least.
std::chrono::nanoseconds origin_of_day() {
  std::chrono::nanoseconds shortest = std::chrono::nanoseconds::max(), origin{};
  for (int reading = 0; reading < kClockReadings; ++reading) {
    const auto before = ProcessSet::Clock::now();
    const auto day = std::chrono::system_clock::now();
    const auto took = ProcessSet::Clock::now() - before;
    if (took >= shortest) continue;
    shortest = took;
    origin = day.time_since_epoch() - (before + took / 2).time_since_epoch();
  }
  return origin;
}

// On a clock that ranks share: exactly on one host, and between hosts as well as their times of day agree.
double seconds_of(ProcessSet::Clock::time_point time) {
  static const std::chrono::nanoseconds origin = origin_of_day();
  return std::chrono::duration<double>(time.time_since_epoch() + origin).count();
}

}  // namespace

ProcessSet::ProcessSet(ProcessSetConfig config, const EngineOptions& options, Arena* arena, const PeerWatch* watch,
                       LaunchOrder& order, Settle settle, Turn ask_turn, Turn give_turn)
    : config_(std::move(config)),
      options_(options),
      watch_(watch),
      order_(order),
      settle_(std::move(settle)),
      ask_turn_(std::move(ask_turn)),
      give_turn_(std::move(give_turn)) {
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
  if (StallInspector::wanted(options_.stall)) {
    stall_.emplace(options_.stall, parent_ ? RankSet() : ranks_from(config_.own));
  }
  negotiation_ = std::make_unique<Negotiation>(!parent_, std::move(participants), options_.cache_capacity);

  auto host_plane = make_host_plane(arena, host, own);
  NcclConfig nccl{config_.id, config_.own, config_.ranks, options_.nccl_alone, options_.shared_gpu};
  auto nccl_plane = std::make_unique<NcclPlane>(
      std::move(nccl), *host_plane, order_,
      [this](const std::shared_ptr<Operation>& operation) { complete(operation); },
      [this](const std::shared_ptr<Operation>& operation, const Error& error) { refuse(operation, error); });
  plane_ = std::make_unique<PlaneByDevice>(std::move(host_plane), std::move(nccl_plane));
}

// `host`: of this rank, and `own_local`: its index among the set's ranks there.
std::unique_ptr<Plane> ProcessSet::make_host_plane(Arena* arena, size_t host, size_t own_local) {
  const auto& hosts = config_.hosts;
  const auto size = static_cast<int>(config_.ranks.size());
  const auto on_complete = [this](const std::shared_ptr<Operation>& operation) { complete(operation); };
  if (size == 1) return std::make_unique<SoloPlane>(on_complete);
  std::unique_ptr<SharedMemoryPlane> stream;
  std::unique_ptr<MpiRingPlane> ring;
  if (hosts.size() < config_.ranks.size()) {  // some host has several ranks
    std::optional<Across> across;
    if (hosts.size() > 1) {
      across.emplace(Across{*config_.mpi, hosts, host, MpiTags(config_.generation), options_.ring_segment_bytes});
    }
    stream = std::make_unique<SharedMemoryPlane>(*arena, config_.region, config_.local, own_local, options_.chunk_bytes,
                                                 across, on_complete);
  }
  if (hosts.size() > 1) {
    ring = std::make_unique<MpiRingPlane>(*config_.mpi, config_.own, size, config_.generation,
                                          options_.ring_segment_bytes, on_complete);
  }
  if (stream && ring) return std::make_unique<HierarchicalPlane>(std::move(stream), std::move(ring));
  if (stream) return stream;
  return ring;
}

// The world ranks of the subtree of `index`.
RankSet ProcessSet::ranks_from(int index) const {
  RankSet ranks;
  for (const int below : subtree(config_.hosts, index)) ranks.add(RankSet(config_.ranks[static_cast<size_t>(below)]));
  return ranks;
}

void ProcessSet::submit(std::shared_ptr<Operation> operation) {
  if (!operation->request->family.name.empty() && !goes_on(operation)) return;
  const Request& request = *operation->request;
  if (name_in_use(request)) return refuse_name(operation);
  if (undecided_.contains(request.name)) {
    behind_[request.name].push_back(std::move(operation));
    return;
  }
  if (!request.family.name.empty() && request.refusal.empty()) family_names_[request.name] = operation.get();
  last_news_ = Clock::now();
  operation->trace.submitted(operation->request, operation->signature, operation->process_set, last_news_);
  if (request.kind == Kind::join) {
    join_ = std::move(operation);
    negotiation_->join();
    return;
  }
  ++news_;
  last_submitted_ = request.name;
  negotiation_->set_now(seconds_of(last_news_));
  negotiation_->submit(request.name, *operation->signature, operation->absent);
  undecided_.emplace(request.name, std::move(operation));
}

std::optional<std::chrono::nanoseconds> ProcessSet::nap() const {
  using Nanoseconds = std::chrono::nanoseconds;
  if (polls()) {
    return std::clamp<Nanoseconds>((Clock::now() - last_progress_) / kNapPart, kShortestNap, kLongestNap);
  }
  std::optional<Nanoseconds> nap;
  const auto at_most = [&](Nanoseconds limit) { nap = std::min(nap.value_or(limit), limit); };
  if (config_.mpi || (parent_ && !children_.empty())) at_most(kIdleNap);
  if (!stuck_text_.empty()) at_most(kStuckAfter);
  if (broken_) at_most(kNewsTime);
  if (plane_ && plane_->needs_watching()) at_most(kWatchNap);
  if (stall_ && (negotiation_->anything_pending() || !executing_.empty())) {
    at_most(std::chrono::duration_cast<Nanoseconds>(stall_->interval()));
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
    progressed |= advance_plane();
    end_plane();
  }
  if (!progressed) inspect();
  if (!stuck_text_.empty()) report_stuck();
  if (progressed) last_progress_ = Clock::now();
  return progressed;
}

bool ProcessSet::advance_plane() {
  if (broken_) {
    if (Clock::now() - broken_->since > kNewsTime) fail_everywhere({.loss = Loss::failed, .text = broken_->text});
    return false;
  }
  try {
    const bool moved = plane_->advance() == Progress::progressed;
    news_ += moved;
    return moved;
  } catch (const std::exception& error) {
    broken_ = {Clock::now(), "rank " + std::to_string(world_rank()) + ": " + error.what()};
    return false;
  }
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
  const std::string died =
      "rank " + std::to_string(edge.rank) + " has died: it was killed or it crashed. See the end of its output.";
  const Lost lost = farewell ? *farewell : Lost{.loss = Loss::failed, .text = died};
  if (child) {
    negotiation_->lost(lost);
  } else {
    negotiation_->parent_lost(lost);
  }
  return true;
}

void ProcessSet::send_messages() {
  const std::string up = negotiation_->take_for_parent(), down = negotiation_->take_for_children();
  const bool urgent = negotiation_->take_urgent();
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

void ProcessSet::apply_decisions() {
  const auto decisions = negotiation_->take_decisions();
  if (decisions.empty()) return;
  const Clock::time_point now = Clock::now();
  for (const Decision& decision : decisions) {
    if (decision.type < Decision::Type::stuck) {
      last_news_ = now;
      ++news_;
      stuck_text_.clear();
    }
    switch (decision.type) {
      case Decision::Type::execute:
        execute(decision);
        break;
      case Decision::Type::fail:
        for (const std::string& family : decision.families) fail_family(family, decision);
        fail(decision.name, {ErrorKind::mismatch, decision.text});
        for (const std::string& family : decision.families) submit_held(family);
        break;
      case Decision::Type::refuse:
        fail(decision.name, {kind_of(decision.loss), decision.text});
        break;
      case Decision::Type::lost:
        apply_lost(decision);
        break;
      case Decision::Type::asked:
        if (parent_) ++news_;
        for (Edge& child : children_) child.link->nudge();
        if (options_.stack_signal != 0 && undecided_.empty() && executing_.empty())
          kill(getpid(), options_.stack_signal);
        negotiation_->tell(world_rank(), status());
        break;
      case Decision::Type::told:
        if (stall_) stall_->told(decision.rank, decision.text);
        break;
      case Decision::Type::turn:
        for (Edge& child : children_) child.link->nudge();
        give_turn_(decision.rank, decision.number);
        break;
      case Decision::Type::stuck:
        stuck_text_ = decision.text;
        stuck_since_ = Clock::now();
        break;
      case Decision::Type::join_done: {
        const auto join = std::exchange(join_, nullptr);
        join->trace.decided(now);
        join->handle->last_joined = decision.rank;
        settle(join, nullptr);
        break;
      }
    }
  }
}

void ProcessSet::fail(const std::string& name, const Error& error) {
  if (const auto found = undecided_.extract(name); !found.empty()) settle(found.mapped(), &error);
  submit_next(name);
}

// What this rank has submitted of it, and what it has yet to submit in the same run.
void ProcessSet::fail_family(const std::string& family, const Decision& decision) {
  families_.count_failure(family);
  refused_.erase(family);
  const Error error{ErrorKind::mismatch, "it was given up together with '" + decision.name + "': " + decision.text};
  std::vector<std::string> names;
  for (const auto& [name, operation] : undecided_) {
    if (operation->request->family.name != family) continue;
    families_.end_run(operation->request->family, error);
    if (name != decision.name) names.push_back(name);
  }
  // The names are free again at once, also those of operations that are being executed.
  std::erase_if(family_names_,
                [&](const auto& entry) { return families_.failure_of(entry.second->request->family) != nullptr; });
  for (const std::string& name : names) fail(name, error);
}

// Whether the run that an operation is a part of has not failed, and no other run of this rank will, which knows that it has
// refused before the others do. Then the operation is of the family's present attempt.
bool ProcessSet::goes_on(const std::shared_ptr<Operation>& operation) {
  const Family& family = operation->request->family;
  if (const Error* const error = families_.failure_of(family)) {
    settle_(operation, error);
    return false;
  }
  if (!operation->request->refusal.empty()) {
    refused_[family.name] = family.run;
  } else if (const auto refused = refused_.find(family.name);
             refused != refused_.end() && refused->second != family.run) {
    held_[family.name].push_back(operation);
    return false;
  }
  if (const size_t failures = families_.failures(family.name); failures > 0) {
    const auto request = std::make_shared<Request>(*operation->request);
    request->family.attempt = failures;
    operation->signature = std::make_shared<const std::string>(request->signature());
    operation->request = request;
  }
  return true;
}

void ProcessSet::submit_held(const std::string& family) {
  auto held = held_.extract(family);
  if (held.empty()) return;
  for (auto& operation : held.mapped()) submit(std::move(operation));
}

// Two operations of one name are under way where one of them belongs to a family; the engine has looked at others.
bool ProcessSet::name_in_use(const Request& request) const {
  if (!request.refusal.empty()) return false;
  if (family_names_.contains(request.name)) return true;
  const auto undecided = undecided_.find(request.name);
  return !request.family.name.empty() && undecided != undecided_.end() && undecided->second->request->refusal.empty();
}

// The other ranks may wait for it.
void ProcessSet::refuse_name(const std::shared_ptr<Operation>& operation) {
  const Request& request = *operation->request;
  const std::string why = subject_of(request) + " on rank " + std::to_string(world_rank()) + ": " + kNameInUse;
  submit(refusal_of(request.kind, request.name, config_.id, why));
  const Error error{ErrorKind::duplicate_name, kNameInUse};
  settle_(operation, &error);
}

void ProcessSet::settle(const std::shared_ptr<Operation>& operation, const Error* error) {
  const auto holds = family_names_.find(operation->request->name);
  if (holds != family_names_.end() && holds->second == operation.get()) family_names_.erase(holds);
  settle_(operation, error);
}

void ProcessSet::submit_next(const std::string& name) {
  while (!undecided_.contains(name)) {
    const auto behind = behind_.find(name);
    if (behind == behind_.end()) return;
    auto next = std::move(behind->second.front());
    behind->second.pop_front();
    if (behind->second.empty()) behind_.erase(behind);
    submit(std::move(next));
  }
}

void ProcessSet::execute(const Decision& decision) {
  const auto found = undecided_.extract(decision.name);
  const auto operation = found.empty() ? neutral(decision.signature) : found.mapped();
  operation->decision = decision.number;
  operation->absent = decision.absent;
  operation->contributors = static_cast<int>(config_.ranks.size()) - decision.joined_ranks;
  operation->any_joined = decision.joined_ranks > 0;
  const auto root = std::find(config_.ranks.begin(), config_.ranks.end(), operation->request->root);
  operation->root = static_cast<int>(root - config_.ranks.begin());
  executing_.emplace(decision.number, operation);
  operation->trace.decided(last_news_);
  if (!operation->request->on_host()) take_turn(decision.number);
  plane_->start(operation);
  submit_next(decision.name);
}

// A rank alone waits for nobody, so its place in the order makes no difference to others.
void ProcessSet::take_turn(uint64_t decision) {
  if (config_.id == 0 || config_.ranks.size() == 1) {
    order_.add(config_.id, decision);
  } else if (config_.own == 0) {
    ask_turn_(config_.id, decision);
  }
}

void ProcessSet::ask_turn(int process_set, uint64_t decision) {
  negotiation_->ask_turn(process_set, decision);
  send_messages();
  apply_decisions();
  send_messages();
}

// The part of a rank that has joined.
std::shared_ptr<Operation> ProcessSet::neutral(const std::string& signature) const {
  auto operation = std::make_shared<Operation>(*join_);
  const auto request = std::make_shared<Request>(Request::decode(signature));
  if (!request->on_host() && !join_->request->on_host()) request->device = join_->request->device;
  operation->request = request;
  operation->reported = false;
  operation->handle = std::make_shared<Handle>(0);
  operation->buffers.assign(request->members.size(), {});
  if (request->kind == Kind::alltoall) {
    for (Buffer& buffer : operation->buffers) buffer.splits.assign(config_.ranks.size(), 0);
  }
  operation->signature = std::make_shared<const std::string>(signature);
  operation->trace = {join_->trace.timeline};
  operation->trace.submitted(request, operation->signature, operation->process_set, last_news_);
  return operation;
}

void ProcessSet::complete(const std::shared_ptr<Operation>& operation) {
  if (operation->inner) return operation->inner();
  executing_.erase(operation->decision);
  settle(operation, nullptr);
}

void ProcessSet::refuse(const std::shared_ptr<Operation>& operation, const Error& error) {
  executing_.erase(operation->decision);
  settle(operation, &error);
}

void ProcessSet::abandon_undecided(const Error& error) {
  const auto undecided = std::exchange(undecided_, {});
  for (const auto& [name, operation] : undecided) settle(operation, &error);
  const auto behind = std::exchange(behind_, {});
  for (const auto& [name, operations] : behind) {
    for (const auto& operation : operations) settle(operation, &error);
  }
  const auto held = std::exchange(held_, {});
  for (const auto& [family, operations] : held) {
    for (const auto& operation : operations) settle(operation, &error);
  }
  if (const auto join = std::exchange(join_, nullptr)) settle(join, &error);
}

void ProcessSet::abandon_executing(const Error& error) {
  const auto executing = std::exchange(executing_, {});
  for (const auto& [number, operation] : executing) settle(operation, &error);
}

void ProcessSet::apply_lost(const Decision& lost) {
  if (lost.loss >= Loss::failed) do_not_finalize_mpi();
  last_ = {lost.number, {kind_of(lost.loss), lost.text}};
  if (config_.id == 0) order_.end(lost.text);
  abandon_undecided(last_->error);
  end_plane();
}

// Once a rank is lost: what it has done its part in is completed, then the rest ends, and with it the plane.
void ProcessSet::end_plane() {
  if (!last_ || !plane_ || (!broken_ && finished() < last_->decision)) return;
  plane_.reset();
  abandon_executing(last_->error);
}

// The number of decisions that this rank has carried out.
uint64_t ProcessSet::finished() const {
  return executing_.empty() ? negotiation_->decisions_seen() : executing_.begin()->first - 1;
}

// For what this rank knows and its parent may not be able to pass on.
void ProcessSet::fail_everywhere(const Lost& lost) {
  negotiation_->lost(lost);
  negotiation_->parent_lost(lost);
  send_messages();
  apply_decisions();
}

void ProcessSet::leave(bool failed, const std::string& reason, const Error& error) {
  const Lost lost{failed ? Loss::failed : Loss::left, finished(), reason};
  if (plane_ && !failed) plane_->drain(kDrainLimit);
  plane_.reset();
  abandon_undecided(error);
  abandon_executing(error);
  if (parent_ && !parent_->lost) parent_->link->send_farewell(lost);
  for (Edge& child : children_) {
    if (!child.lost) child.link->send_farewell(lost);
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

// While nothing moves: has somebody waited for too long?
void ProcessSet::inspect() {
  const Clock::time_point now = Clock::now();
  if (!stall_ || now < next_inspection_) return;
  next_inspection_ = now + std::chrono::duration_cast<Clock::duration>(stall_->interval() / 2);
  const StallInspector::Action action = stall_->look(now, waiting());
  if (parent_) {
    inspect_as_other(action, now);
  } else {
    inspect_as_root(action, now);
  }
}

void ProcessSet::inspect_as_root(StallInspector::Action action, Clock::time_point now) {
  if (action == StallInspector::Action::report) warn(stall_->report(now, describe_waiting()));
  if (action == StallInspector::Action::give_up)
    negotiation_->lost({.loss = Loss::stall, .text = stall_->report(now, describe_waiting())});
  if (action == StallInspector::Action::ask) negotiation_->ask();
  send_messages();
  apply_decisions();
  send_messages();
}

void ProcessSet::inspect_as_other(StallInspector::Action action, Clock::time_point now) {
  const auto silence = [&] {
    return stall_->report_silence(now, world_rank(), status(), parent_->rank, config_.ranks[0]);
  };
  // The root may be idle and asleep, and then does not know that it is waited for.
  if (waiting() && !parent_->lost && now - last_news_ > stall_->interval()) parent_->link->nudge();
  if (action == StallInspector::Action::report) warn(silence());
  if (action == StallInspector::Action::give_up) fail_everywhere({.loss = Loss::stall, .text = silence()});
}

// What has waited longest, as a number that stays the same as long as nothing moves.
std::optional<uint64_t> ProcessSet::waiting() const {
  if (parent_) return undecided_.empty() && executing_.empty() ? std::nullopt : std::optional(news_);
  if (const auto oldest = negotiation_->oldest()) return oldest;
  return executing_.empty() ? std::nullopt : std::optional(std::numeric_limits<uint64_t>::max() - news_);
}

// At the root.
std::string ProcessSet::describe_waiting() const {
  std::string text = negotiation_->describe_pending();
  if (executing_.empty()) return text;
  if (!text.empty()) text += "; ";
  return text + "'" + executing_.begin()->second->request->name + "' has been begun but not finished";
}

// What this rank is doing, for a report.
std::string ProcessSet::status() const {
  const auto ago = std::to_string(std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - last_news_).count());
  if (!executing_.empty()) return "is executing '" + executing_.begin()->second->request->name + "'";
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
  warn(stuck_text_);
  stuck_text_.clear();
}

}  // namespace horovodish
