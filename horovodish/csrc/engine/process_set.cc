#include "engine/process_set.h"

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>

#include "abi/mpi_exit.h"
#include "negotiation/shared_clock.h"

namespace horovodish {

namespace {

// MPI rings no doorbell. While something is under way the engine looks again after a nap of 1 / kNapPart of the time
// that it has waited, within the two limits: a wait gets longer by that part at most.
constexpr int kNapPart = 2;
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};
// MPI may report a peer's death before its last words, or those of the rank that knows why, have arrived.
constexpr std::chrono::seconds kNewsTime{3};
// How long the engine of an idle rank sleeps where peers on other hosts cannot wake it, or where it is between others
// in the tree, whose news does not wake a rank that has nothing under way.
constexpr std::chrono::milliseconds kIdleNap{20};
// For this long after a note for the owner, a rank that nobody can wake naps for kLongestNap at most. Notes pass through such
// ranks, and a job that needs them needs them in every step.
constexpr std::chrono::seconds kNotesGoOn{60};
// How often the engine looks whether what a plane has launched has failed.
constexpr std::chrono::milliseconds kWatchNap{100};
// How long a rank that leaves waits for what it has launched. Peers may need it that have computed for longer.
constexpr std::chrono::seconds kDrainLimit{10};

// For ranks that wait for one that has left in order, such as one whose script has ended.
constexpr std::string_view kLeftRemedy =
    "\nRemedy: if the ranks have different numbers of batches, give them all as many, or call hvd.join() after the "
    "last "
    "one. If a collective is under `if rank == 0:` or the like, call it on every rank.";

ErrorKind kind_of(Loss loss) { return loss == Loss::stall ? ErrorKind::stalled : ErrorKind::rank_lost; }

std::string text_of(WorldRank rank, const std::exception_ptr& failure) {
  std::string why;
  try {
    std::rethrow_exception(failure);
  } catch (const std::bad_alloc&) {
    why = kOutOfMemory;
  } catch (const std::exception& error) {
    why = error.what();
  }
  return horovodish::text_of(rank) + ": " + why;
}

}  // namespace

ProcessSet::ProcessSet(ProcessSetConfig config, const EngineOptions& options, Arena* arena, const PeerWatch* watch,
                       const MakePlane& make_plane, Owner& owner)
    : config_(std::move(config)),
      options_(options),
      owner_(owner),
      neighbours_(config_, arena, watch),
      negotiation_(neighbours_.at_root(), neighbours_.participants(), options_.cache_capacity),
      carried_(config_),
      plane_(make_plane(
          config_, [this](const auto& operation) { complete(operation); },
          [this](const auto& operation, const Error& error) { refuse(operation, error); })),
      operations_(config_.id, world_rank(), *this),
      watch_(config_, options_, negotiation_, neighbours_, operations_, plane_, [this] { return owner_.steps(); }) {}

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
    owner_.decisions_ended(config_.id, last_->error.message);
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

void ProcessSet::flush(bool submits_nothing) noexcept {
  // An executing operation ends without a decision. Its caller may submit more then, so this rank does not wait yet.
  guarded([&] {
    if (!submits_nothing) {
      negotiation_.take_back_flush();
    } else if (operations_.executing().empty()) {
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
  if (progressed) {
    last_progress_ = Clock::now();
  } else {
    const auto [asks, lost] = watch_.inspect();
    if (lost) fail_everywhere(*lost);
    if (asks) exchange();
  }
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
    const bool notes_go_on = last_announced_ && Clock::now() - *last_announced_ < kNotesGoOn;
    at_most(notes_go_on ? Nanoseconds(kLongestNap) : Nanoseconds(kIdleNap));
  }
  if (config_.mpi && neighbours_.has_unsent()) at_most(kLongestNap);
  if (broken_) at_most(kNewsTime);
  if (failure_ && !said_farewell_) at_most(kLongestNap);
  if (plane_ && plane_->needs_watching()) at_most(kWatchNap);
  if (const auto watch = watch_.nap()) at_most(*watch);
  return nap;
}

void ProcessSet::submit(const std::shared_ptr<Operation>& operation) noexcept {
  guarded([&] {
    if (!last_) return operations_.submit(operation);
    operation->trace.submitted(operation->request, operation->signature, operation->process_set, Clock::now());
    // A run that had failed before the ranks parted names its own cause.
    const Error* const earlier = operations_.failure_of(operation->request->family);
    settle(operation, earlier != nullptr ? earlier : &last_->error);
  });
  // If the table had stored the operation, leave_because_of() has failed it already.
  if (failure_ && !operation->handle->settled()) settle(operation, &last_->error);
}

void ProcessSet::state(const std::shared_ptr<Operation>& operation) {
  const Clock::time_point now = Clock::now();
  watch_.submitted(*operation, now);
  operation->trace.submitted(operation->request, operation->signature, operation->process_set, now);
  if (operation->request->kind == Kind::join) return negotiation_.join();
  negotiation_.set_now(shared_seconds(now));
  negotiation_.submit(operation->request->name, *operation->signature, operation->absent, carried_.of(*operation));
}

void ProcessSet::settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept {
  owner_.settle(operation, error);
}

void ProcessSet::exchange() {
  neighbours_.send(negotiation_);
  apply_decisions();
  neighbours_.send(negotiation_);
}

void ProcessSet::apply_decisions() {
  auto next = negotiation_.take_decision();
  if (!next) return;
  const Clock::time_point now = Clock::now();
  for (; next; next = negotiation_.take_decision()) {
    const Decision& decision = *next;
    if (decision.type < Decision::Type::stuck) watch_.decided(now);
    const bool is_result = decision.type == Decision::Type::execute || decision.type == Decision::Type::join_done;
    if (last_ && is_result) continue;  // this rank has given up, which those that decide did not know yet
    switch (decision.type) {
      case Decision::Type::execute:
        execute(decision, now);
        break;
      case Decision::Type::fail:
        operations_.fail(decision.name, decision.text, decision.families);
        break;
      case Decision::Type::lost:
        apply_lost(decision);
        break;
      case Decision::Type::said:
        apply_said(decision.note);
        break;
      case Decision::Type::announced:
        apply_announced(decision.note, now);
        break;
      case Decision::Type::stuck:
        watch_.stuck(decision.text);
        break;
      case Decision::Type::join_done:
        operations_.join()->trace.decided(now);
        operations_.end_join(decision.rank);
        break;
    }
  }
}

// At the root.
void ProcessSet::apply_said(const Note& note) {
  if (note.topic == Note::Topic::status) {
    watch_.told(note.rank, note.text);
  } else {
    negotiation_.announce(note);
    neighbours_.send(negotiation_);
  }
}

void ProcessSet::apply_announced(const Note& note, Clock::time_point now) {
  neighbours_.nudge_children();
  if (note.topic == Note::Topic::status || note.topic == Note::Topic::status_of_gpus) {
    watch_.asked(note.topic == Note::Topic::status_of_gpus, now);
  } else {
    last_announced_ = now;
    owner_.announced(note);
  }
}

void ProcessSet::execute(const Decision& decision, Clock::time_point now) {
  const auto operation =
      decision.submitted ? operations_.begin(decision.name, decision.number) : operation_for_joined(decision, now);
  operation->absent = decision.absent;
  const bool over_size = options_.averages_over_size && operation->request->kind == Kind::allreduce;
  operation->contributors = static_cast<int>(config_.ranks.size()) - (over_size ? 0 : decision.joined_ranks);
  operation->any_joined = decision.joined_ranks > 0;
  const auto root = std::find(config_.ranks.begin(), config_.ranks.end(), operation->request->root);
  operation->root = static_cast<int>(root - config_.ranks.begin());
  operation->trace.decided(now);
  if (operation->request->kind == Kind::broadcast && root == config_.ranks.end()) {
    refuse(operation, {ErrorKind::internal, "root_rank=" + std::to_string(number_of(operation->request->root)) +
                                                " is not in the process set. Remedy: name one of its ranks."});
  } else if (carried_.finish(*operation, decision.values)) {
    complete(operation);
  } else {
    plane_->start(operation);
  }
  operations_.submit_next(decision.name);
}

// The part of a rank that has joined.
std::shared_ptr<Operation> ProcessSet::operation_for_joined(const Decision& decision, Clock::time_point now) {
  const auto& join = operations_.join();
  if (!join) throw OperationTable::unexpected(decision.name);
  const auto request = std::make_shared<Request>(Request::decode(decision.signature));
  if (!request->on_host() && !join->request->on_host()) request->device = join->request->device;
  Buffer none;
  if (request->any_rows()) none.rows.assign(request->kind == Kind::allgather ? 1 : config_.ranks.size(), 0);
  auto operation = operation_of(request, std::vector(request->members.size(), none), join->process_set,
                                std::make_shared<Handle>(0), std::make_shared<const std::string>(decision.signature));
  operation->trace = {join->trace.timeline};
  operation->trace.submitted(request, operation->signature, operation->process_set, now);
  operation->decision = decision.number;
  operations_.begin_for_joined(operation);
  return operation;
}

void ProcessSet::say(const Note& note) noexcept {
  guarded([&] {
    negotiation_.say(note);
    exchange();
  });
}

bool ProcessSet::advance_plane() {
  if (broken_) {
    if (Clock::now() - broken_->since > kNewsTime) fail_everywhere({.loss = Loss::failed, .text = broken_->text});
    return false;
  }
  try {
    const bool moved = plane_->advance() == Progress::progressed;
    if (moved) watch_.moved();
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
  operations_.end(operation, nullptr);
}

void ProcessSet::refuse(const std::shared_ptr<Operation>& operation, const Error& error) {
  operations_.end(operation, &error);
}

// The number of decisions that this rank has carried out.
uint64_t ProcessSet::finished() const {
  const auto& executing = operations_.executing();
  return executing.empty() ? negotiation_.decisions_seen() : executing.begin()->first - 1;
}

// Of several losses all calls name the first.
void ProcessSet::apply_lost(const Decision& lost) {
  if (lost.loss == Loss::failed) do_not_finalize_mpi();
  if (lost.loss == Loss::stall) do_not_finalize_mpi_for_long();
  if (!last_) last_ = {0, {kind_of(lost.loss), lost.text, lost.loss == Loss::left ? kLeftRemedy : ""}};
  last_->decision = lost.number;
  last_->wait_until = lost.loss == Loss::left ? Clock::now() + kDrainLimit : Clock::time_point{};
  owner_.decisions_ended(config_.id, lost.text);
  operations_.abandon_undecided(last_->error);
  end_plane();
}

// Once a rank is lost: what it has done its part in is completed, then the rest ends, and with it the plane.
void ProcessSet::end_plane() {
  if (!last_ || !plane_ || (!broken_ && finished() < last_->decision)) return;
  const bool waits = !broken_ && plane_->needs_watching() && operations_.executing().empty();
  if (waits && Clock::now() < last_->wait_until) return;
  end_plane_because_of(last_->error);
  operations_.abandon_executing(last_->error);
}

void ProcessSet::end_plane_because_of(const Error& error) {
  if (plane_) plane_->about_to_end(error);
  plane_.reset();
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
    const Error error{ErrorKind::engine_stopped, "shutdown() was called on " + horovodish::text_of(world_rank()) +
                                                     " while the operation was pending"};
    if (plane_ && !failed) plane_->drain(kDrainLimit);
    leave({failed ? Loss::failed : Loss::left, finished(), reason}, error);
  });
}

void ProcessSet::leave(const Lost& lost, const Error& error) {
  end_plane_because_of({ErrorKind::rank_lost, lost.text});
  operations_.abandon_undecided(error);
  operations_.abandon_executing(error);
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

}  // namespace horovodish
