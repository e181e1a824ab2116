#include "process_set.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>

#include "mpi_exit.h"
#include "planes/make_plane.h"
#include "shared_clock.h"

namespace horovodish {

namespace {

// Every rank waits and nothing can be decided. A thread that has never waited, such as one of a framework, may still submit
// something, so the ranks fail only when nothing was submitted for this time.
constexpr std::chrono::seconds kStuckAfter{5};
// MPI rings no doorbell. While something is under way the engine looks again after a nap of 1 / kNapPart of the time
// that it has waited, within the two limits: a wait gets longer by that part at most.
constexpr int kNapPart = 2;
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};
// MPI may report a peer's death before its last words, or those of the rank that knows why, have arrived.
constexpr std::chrono::seconds kNewsTime{3};
// How long the engine of an idle rank sleeps where peers on other hosts cannot wake it, or where it is between others
// in the tree, whose news does not wake a rank that has nothing under way.
constexpr std::chrono::milliseconds kIdleNap{500};
// For this long after a turn, a rank that nobody can wake naps for kLongestNap at most. A turn passes through such ranks, and
// a job that reduces CUDA tensors in several sets asks for turns in every step.
constexpr std::chrono::seconds kTurnsGoOn{60};
// How often the engine looks whether what it has launched on the GPU has failed.
constexpr std::chrono::milliseconds kWatchNap{100};
// How long a rank that leaves waits for what its GPU still does. Peers may need it that have computed for longer.
constexpr std::chrono::seconds kDrainLimit{10};

ErrorKind kind_of(Loss loss) { return loss == Loss::stall ? ErrorKind::stalled : ErrorKind::rank_lost; }

std::string text_of(int rank, const std::exception_ptr& failure) {
  std::string why;
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    why = kOutOfMemory;
  } catch (const std::exception& error) {
    why = error.what();
  }
  return "rank " + std::to_string(rank) + ": " + why;
}

void warn(const std::string& text) { std::fprintf(stderr, "horovodish: warning: %s\n", text.c_str()); }

}  // namespace

ProcessSet::ProcessSet(ProcessSetConfig config, const EngineOptions& options, Arena* arena, const PeerWatch* watch,
                       LaunchOrder& order, Settle settle, Turn ask_turn, Turn give_turn)
    : config_(std::move(config)),
      options_(options),
      order_(order),
      settle_(std::move(settle)),
      ask_turn_(std::move(ask_turn)),
      give_turn_(std::move(give_turn)),
      neighbours_(config_, arena, watch),
      negotiation_(neighbours_.at_root(), neighbours_.participants(), options_.cache_capacity),
      plane_(make_plane(
          config_, options_, arena, order_, [this](const auto& operation) { complete(operation); },
          [this](const auto& operation, const Error& error) { refuse(operation, error); })) {
  if (!StallInspector::wanted(options_.stall)) return;
  RankSet all;
  for (const int rank : config_.ranks) all.add(RankSet(rank));
  stall_.emplace(options_.stall, neighbours_.at_root() ? all : RankSet());
}

// Nothing may leave the driver: an exception would end the process on the engine's thread, and on a caller's it would look like an
// error of the caller's. Nobody can go on with what a failed step has left half done, so this rank leaves the set.
template <class Step>
void ProcessSet::guarded(Step step) noexcept {
  try {
    if (!failure_) step();
  } catch (...) {
    failure_ = std::current_exception();
  }
  if (failure_ && !said_farewell_) leave_because_of(failure_);
}

// Where there is no memory for the farewell either, the next step tries again.
void ProcessSet::leave_because_of(const std::exception_ptr& failure) noexcept {
  do_not_finalize_mpi();
  if (!last_) last_ = {0, {ErrorKind::rank_lost, kOutOfMemory}};
  try {
    if (last_->error.message == kOutOfMemory) last_->error.message = text_of(world_rank(), failure);
    if (config_.id == 0) order_.end(last_->error.message);
  } catch (const std::bad_alloc&) {
  }
  try {
    leave({.loss = Loss::failed, .text = last_->error.message}, last_->error);
  } catch (const std::exception&) {
  }
}

bool ProcessSet::turn() noexcept {
  bool progressed = false;
  guarded([&] { progressed = advance(); });
  if (failure_) advance_farewell();
  return progressed;
}

void ProcessSet::flush(bool all_threads_wait) noexcept {
  // An executing operation ends without a decision. Its caller may submit more then, so this rank does not wait yet.
  guarded([&] {
    if (!all_threads_wait) {
      negotiation_.take_back_flush();
    } else if (executing_.empty()) {
      negotiation_.flush();
    }
  });
}

bool ProcessSet::advance() {
  bool progressed = neighbours_.receive(negotiation_);
  neighbours_.send(negotiation_);
  apply_decisions();
  if (plane_) {
    progressed |= advance_plane();
    end_plane();
  }
  if (!progressed) inspect();
  if (!stuck_text_.empty()) end_stuck();
  if (progressed) last_progress_ = Clock::now();
  return progressed;
}

std::optional<std::chrono::nanoseconds> ProcessSet::nap() const {
  using Nanoseconds = std::chrono::nanoseconds;
  if (polls()) {
    return std::clamp<Nanoseconds>((Clock::now() - last_progress_) / kNapPart, kShortestNap, kLongestNap);
  }
  std::optional<Nanoseconds> nap;
  const auto at_most = [&](Nanoseconds limit) { nap = std::min(nap.value_or(limit), limit); };
  if (config_.mpi || neighbours_.between_others()) {
    at_most(last_turn_ && Clock::now() - *last_turn_ < kTurnsGoOn ? Nanoseconds(kLongestNap) : Nanoseconds(kIdleNap));
  }
  if (!stuck_text_.empty()) at_most(kStuckAfter);
  if (config_.mpi && neighbours_.has_unsent()) at_most(kLongestNap);
  if (broken_) at_most(kNewsTime);
  if (failure_ && !said_farewell_) at_most(kLongestNap);
  if (plane_ && plane_->needs_watching()) at_most(kWatchNap);
  if (stall_ && (negotiation_.anything_pending() || negotiation_.any_joined() || !executing_.empty())) {
    at_most(std::chrono::duration_cast<Nanoseconds>(stall_->interval()));
  }
  return nap;
}

void ProcessSet::submit(const std::shared_ptr<Operation>& operation) noexcept {
  guarded([&] { take_up(operation); });
  // If take_up() had stored the operation, leave_because_of() has failed it already.
  if (failure_ && !operation->handle->settled()) settle(operation, &last_->error);
}

void ProcessSet::take_up(const std::shared_ptr<Operation>& operation) {
  if (last_) {
    operation->trace.submitted(operation->request, operation->signature, operation->process_set, Clock::now());
    return settle_(operation, &last_->error);
  }
  if (const Error* const error = families_.failure_of(operation->request->family)) return settle_(operation, error);
  if (!families_.admit(operation)) return;
  const Request& request = *operation->request;
  if (name_in_use(request)) return refuse_name(operation);
  if (undecided_.contains(request.name)) {
    behind_[request.name].push_back(operation);
    return;
  }
  families_.claim_name(*operation);
  last_news_ = Clock::now();
  operation->trace.submitted(operation->request, operation->signature, operation->process_set, last_news_);
  if (request.kind == Kind::join) {
    join_ = operation;
    negotiation_.join();
    return;
  }
  ++news_;
  last_submitted_ = operation->request;
  negotiation_.set_now(shared_seconds(last_news_));
  negotiation_.submit(request.name, *operation->signature, operation->absent);
  undecided_.emplace(request.name, operation);
}

// Two operations of one name are under way where one of them belongs to a family; the engine has looked at others.
bool ProcessSet::name_in_use(const Request& request) const {
  if (!request.refusal.empty()) return false;
  if (families_.has_name(request.name)) return true;
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

void ProcessSet::submit_next(const std::string& name) {
  while (!undecided_.contains(name)) {
    const auto behind = behind_.find(name);
    if (behind == behind_.end()) return;
    auto next = std::move(behind->second.front());
    behind->second.pop_front();
    if (behind->second.empty()) behind_.erase(behind);
    submit(next);
  }
}

void ProcessSet::fail(const std::string& name, const Error& error) {
  if (const auto found = undecided_.extract(name); !found.empty()) settle(found.mapped(), &error);
  submit_next(name);
}

// What this rank has submitted of it, and what it has yet to submit in the same run.
void ProcessSet::fail_family(const std::string& family, const Decision& decision) {
  families_.forget_refusal(family);
  const Error error{ErrorKind::mismatch, "it was given up together with '" + decision.name + "': " + decision.text};
  std::vector<std::string> names;
  for (const auto& [name, operation] : undecided_) {
    if (operation->request->family.name != family) continue;
    families_.end_run(operation->request->family, error);
    if (name != decision.name) names.push_back(name);
  }
  for (const std::string& name : names) fail(name, error);
}

void ProcessSet::abandon_undecided(const Error& error) noexcept {
  const auto undecided = std::exchange(undecided_, {});
  for (const auto& [name, operation] : undecided) settle(operation, &error);
  const auto behind = std::exchange(behind_, {});
  for (const auto& [name, operations] : behind) {
    for (const auto& operation : operations) settle(operation, &error);
  }
  while (families_.hold_any()) {
    for (const auto& operation : families_.take_any_held()) settle(operation, &error);
  }
  if (const auto join = std::exchange(join_, nullptr)) settle(join, &error);
}

void ProcessSet::apply_decisions() {
  auto next = negotiation_.take_decision();
  if (!next) return;
  const Clock::time_point now = Clock::now();
  for (; next; next = negotiation_.take_decision()) {
    const Decision& decision = *next;
    if (decision.type < Decision::Type::stuck) {
      last_news_ = now;
      ++news_;
      stuck_text_.clear();
    }
    const bool is_result = decision.type == Decision::Type::execute || decision.type == Decision::Type::join_done;
    if (last_ && is_result) continue;  // this rank has given up, which those that decide did not know yet
    switch (decision.type) {
      case Decision::Type::execute:
        execute(decision);
        break;
      case Decision::Type::fail:
        for (const std::string& family : decision.families) fail_family(family, decision);
        fail(decision.name, {ErrorKind::mismatch, decision.text});
        for (const std::string& family : decision.families) {
          for (const auto& operation : families_.take_held(family)) submit(operation);
        }
        break;
      case Decision::Type::lost:
        apply_lost(decision);
        break;
      case Decision::Type::asked: {
        if (!neighbours_.at_root()) ++news_;
        neighbours_.nudge_children();
        const auto warning = options_.stall.warning;
        const bool lags = warning.count() > 0 && now - last_news_ > warning && undecided_.empty() && executing_.empty();
        if (options_.stack_signal != 0 && lags && std::exchange(stacks_shown_, last_news_) != last_news_) {
          kill(getpid(), options_.stack_signal);
        }
        negotiation_.tell(world_rank(), status());
        break;
      }
      case Decision::Type::told:
        if (stall_) stall_->told(decision.rank, decision.text);
        break;
      case Decision::Type::turn:
        last_turn_ = now;
        neighbours_.nudge_children();
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

void ProcessSet::execute(const Decision& decision) {
  const auto found = decision.submitted ? undecided_.find(decision.name) : undecided_.end();
  if (decision.submitted ? found == undecided_.end() : !join_) {
    throw std::logic_error("internal error: '" + decision.name +
                           "' was decided although this rank has neither submitted it nor joined. Remedy: report this "
                           "to the authors of horovodish.");
  }
  const auto operation = decision.submitted ? found->second : neutral(decision.signature);
  operation->decision = decision.number;
  operation->absent = decision.absent;
  operation->contributors = static_cast<int>(config_.ranks.size()) - decision.joined_ranks;
  operation->any_joined = decision.joined_ranks > 0;
  const auto root = std::find(config_.ranks.begin(), config_.ranks.end(), operation->request->root);
  operation->root = static_cast<int>(root - config_.ranks.begin());
  if (operation->request->kind == Kind::broadcast && root == config_.ranks.end()) {
    const Error error{ErrorKind::internal, "root_rank=" + std::to_string(operation->request->root) +
                                               " is not in the process set. Remedy: name one of its ranks."};
    if (found != undecided_.end()) undecided_.erase(found);
    settle(operation, &error);
    return submit_next(decision.name);
  }
  executing_.emplace(decision.number, operation);
  if (found != undecided_.end()) undecided_.erase(found);
  operation->trace.decided(last_news_);
  if (!operation->request->on_host()) take_turn(decision.number);
  plane_->start(operation);
  submit_next(decision.name);
}

// The part of a rank that has joined.
std::shared_ptr<Operation> ProcessSet::neutral(const std::string& signature) const {
  auto operation = std::make_shared<Operation>();
  operation->process_set = join_->process_set;
  const auto request = std::make_shared<Request>(Request::decode(signature));
  if (!request->on_host() && !join_->request->on_host()) request->device = join_->request->device;
  operation->request = request;
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

// A rank alone waits for nobody, so its place in the order makes no difference to others.
void ProcessSet::take_turn(uint64_t decision) {
  if (config_.id == 0 || config_.ranks.size() == 1) {
    order_.add(config_.id, decision);
  } else if (config_.own == 0) {
    ask_turn_(config_.id, decision);
  }
}

// A set that has ended alone launches nothing any more, and a turn of its own would hold up all that follow.
void ProcessSet::add_turn(uint64_t decision) {
  if (plane_) order_.add(config_.id, decision);
}

void ProcessSet::ask_turn(int process_set, uint64_t decision) noexcept {
  guarded([&] {
    negotiation_.ask_turn(process_set, decision);
    neighbours_.send(negotiation_);
    apply_decisions();
    neighbours_.send(negotiation_);
  });
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
  } catch (const std::bad_alloc&) {
    throw;  // no news will explain it
  } catch (const std::exception&) {
    broken_ = {Clock::now(), text_of(world_rank(), std::current_exception())};
    return false;
  }
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

void ProcessSet::settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept {
  families_.release_name(*operation);
  settle_(operation, error);
}

// The number of decisions that this rank has carried out.
uint64_t ProcessSet::finished() const {
  return executing_.empty() ? negotiation_.decisions_seen() : executing_.begin()->first - 1;
}

void ProcessSet::abandon_executing(const Error& error) noexcept {
  const auto executing = std::exchange(executing_, {});
  for (const auto& [number, operation] : executing) settle(operation, &error);
}

// Of several losses all calls name the first.
void ProcessSet::apply_lost(const Decision& lost) {
  if (lost.loss >= Loss::failed) do_not_finalize_mpi();
  if (!last_) last_ = {0, {kind_of(lost.loss), lost.text}};
  last_->decision = lost.number;
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

// For what this rank knows and its parent may not be able to pass on.
void ProcessSet::fail_everywhere(const Lost& lost) {
  negotiation_.lost(lost);
  negotiation_.parent_lost(lost);
  neighbours_.send(negotiation_);
  apply_decisions();
}

void ProcessSet::leave(bool failed, const std::string& reason) noexcept {
  guarded([&] {
    const Error error{ErrorKind::engine_stopped, "shutdown() was called on rank " + std::to_string(world_rank()) +
                                                     " while the operation was pending"};
    if (plane_ && !failed) plane_->drain(kDrainLimit);
    leave({failed ? Loss::failed : Loss::left, finished(), reason}, error);
  });
}

void ProcessSet::leave(const Lost& lost, const Error& error) {
  plane_.reset();
  abandon_undecided(error);
  abandon_executing(error);
  neighbours_.send_farewell(lost);
  said_farewell_ = true;
}

bool ProcessSet::advance_farewell() noexcept {
  bool sent = false;
  guarded([] {});
  try {
    sent = neighbours_.advance_farewell();
  } catch (const std::exception&) {
  }
  return sent && said_farewell_;
}

// While nothing moves: has somebody waited for too long?
void ProcessSet::inspect() {
  const Clock::time_point now = Clock::now();
  if (!stall_ || now < next_inspection_) return;
  next_inspection_ = now + std::chrono::duration_cast<Clock::duration>(stall_->interval() / 2);
  const StallInspector::Action action = stall_->look(now, waiting());
  if (neighbours_.at_root()) {
    inspect_as_root(action, now);
  } else {
    inspect_as_other(action, now);
  }
}

void ProcessSet::inspect_as_root(StallInspector::Action action, Clock::time_point now) {
  if (action == StallInspector::Action::report) warn(stall_->report(now, describe_waiting()));
  if (action == StallInspector::Action::give_up)
    negotiation_.lost({.loss = Loss::stall, .text = stall_->report(now, describe_waiting())});
  if (action == StallInspector::Action::ask) negotiation_.ask();
  neighbours_.send(negotiation_);
  apply_decisions();
  neighbours_.send(negotiation_);
}

void ProcessSet::inspect_as_other(StallInspector::Action action, Clock::time_point now) {
  const auto silence = [&] {
    return stall_->report_silence(now, world_rank(), status(), neighbours_.parent_rank(), config_.ranks[0]);
  };
  // The root may be idle and asleep, and then does not know that it is waited for.
  if (waiting() && now - last_news_ > stall_->interval()) neighbours_.nudge_parent();
  if (action == StallInspector::Action::report) warn(silence());
  if (action == StallInspector::Action::give_up) fail_everywhere({.loss = Loss::stall, .text = silence()});
}

// What has waited longest, as a number that stays the same as long as nothing moves.
std::optional<uint64_t> ProcessSet::waiting() const {
  if (!neighbours_.at_root()) {
    return undecided_.empty() && executing_.empty() && !join_ ? std::nullopt : std::optional(news_);
  }
  if (const auto oldest = negotiation_.oldest()) return oldest;
  if (executing_.empty() && !negotiation_.any_joined()) return std::nullopt;
  return std::numeric_limits<uint64_t>::max() - news_;
}

// At the root.
std::string ProcessSet::describe_waiting() const {
  std::string text = negotiation_.describe_pending();
  if (executing_.empty()) return text;
  if (!text.empty()) text += "; ";
  return text + label_of(*executing_.begin()->second->request) + " has been begun but not finished";
}

// What this rank is doing, for a report.
std::string ProcessSet::status() const {
  const auto ago = std::to_string(std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - last_news_).count());
  if (!executing_.empty()) return "is executing " + label_of(*executing_.begin()->second->request);
  if (join_) return "has joined";
  if (!undecided_.empty()) {
    const auto more = undecided_.size() > 1 ? " and " + std::to_string(undecided_.size() - 1) + " more" : std::string();
    return "waits for " + label_of(*undecided_.begin()->second->request) + more;
  }
  if (last_submitted_ == nullptr) return "has not submitted anything yet";
  return "has nothing under way; it last submitted " + label_of(*last_submitted_) + ", and nothing for " + ago + " s";
}

// At the root: ends what nobody can go on with. Where the user wants no check for stalls, that remains a warning.
void ProcessSet::end_stuck() {
  if (!negotiation_.all_wait()) return stuck_text_.clear();
  if (Clock::now() - stuck_since_ < kStuckAfter) return;
  const std::string text = std::exchange(stuck_text_, {});
  if (!stall_) return warn(text);
  negotiation_.lost({.loss = Loss::stall, .text = text});
  neighbours_.send(negotiation_);
  apply_decisions();
}

}  // namespace horovodish
