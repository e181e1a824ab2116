#include "engine/process_set.h"

#include <algorithm>
#include <exception>
#include <new>
#include <string_view>
#include <variant>

#include "engine/engine.h"
#include "negotiation/shared_clock.h"
#include "planes/mpi/mpi_exit.h"
#include "planes/nccl/nccl.h"
#include "planes/stream/stream.h"

namespace horovodish {

namespace {

// MPI rings no doorbell. While something is under way, the engine looks again after a nap of 1 / kNapPart of the time
// that it has waited, within the two limits. So a wait gets longer by at most that part.
constexpr int kNapPart = 2;
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};
// MPI may report a peer's death before the last words of that peer have arrived, or the words of a rank that knows the
// cause.
constexpr std::chrono::seconds kNewsTime{3};
// How long the engine of an idle rank sleeps if peers on other hosts cannot wake it. Also for an inner node of the
// tree: its neighbours' news does not wake a rank that has nothing under way.
constexpr std::chrono::milliseconds kIdleNap{20};
// For this long after a note, a rank that nobody can wake naps for kLongestNap at most. Notes pass through such ranks,
// and a job that needs notes needs them in every step.
constexpr std::chrono::seconds kNotesExpected{60};
// Between hosts, the news that a rank has left may overtake data that the rank sent before. Receives wait this long for
// the data.
constexpr std::chrono::seconds kArrivalLimit{1};
// How often the engine looks whether a launched operation has failed.
constexpr std::chrono::milliseconds kWatchNap{100};
// How long a leaving rank waits for its launched operations. Slower peers may still need this rank.
constexpr std::chrono::seconds kDrainLimit{10};

// Begins the part of a loss's text that only users see.
constexpr std::string_view kRemedy = "\nRemedy: ";

ErrorKind kind_of(Loss loss) {
  if (loss == Loss::retired) return ErrorKind::internal;
  return loss == Loss::stall ? ErrorKind::stalled : ErrorKind::rank_lost;
}

bool in_order(Loss loss) { return loss == Loss::left || loss == Loss::retired; }

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

ProcessSet::ProcessSet(ProcessSetConfig config, const EngineOptions& options, Engine& engine)
    : config_(std::move(config)),
      options_(options),
      engine_(engine),
      neighbours_(config_, engine.arena_.get(), engine.peer_deaths_.get()),
      negotiation_(neighbours_.at_root(), neighbours_.participants(), options_.cache_capacity),
      carried_(config_),
      pairs_(config_, options_.ring_segment_bytes, engine.arena_.get(),
             [this](const auto& operation, const Error* error) { settle(operation, error); }),
      operations_(config_.id, config_.own_rank(), *this),
      stall_watch_(config_, options_, negotiation_, neighbours_, operations_, pairs_, plane_,
                   engine.launched_operations_, engine.steps_) {
  const OnEnd on_end = [this](const auto& operation, const Error* error) { end(operation, error); };
  auto host = std::make_unique<StreamPlane>(config_, options_, engine.arena_.get(), on_end);
  plane_ = std::make_unique<NcclPlane>(config_, options_, std::move(host), engine.launch_order_,
                                       engine.launched_operations_, on_end);
}

// No exception may leave the driver: on the engine's thread it would end the process, and on a caller's thread it would
// look like an error of the caller. Nobody can continue a step that failed halfway, so this rank leaves the set.
template <class Step>
void ProcessSet::guarded(Step step) noexcept {
  try {
    if (!failure_) step();
  } catch (...) {
    failure_ = std::current_exception();
  }
  leave_if_failed();
}

// If there is no memory for the farewell either, the next step tries again.
void ProcessSet::leave_if_failed() noexcept {
  if (!failure_ || said_farewell_) return;
  end_without_lost_ranks(Loss::failed);
  if (!end_) end_ = {0, {ErrorKind::rank_lost, kOutOfMemory}};
  try {
    if (end_->error.message == kOutOfMemory) end_->error.message = text_of(config_.own_rank(), failure_);
    engine_.decisions_ended(config_.id, Loss::failed, end_->error.message);
  } catch (const std::bad_alloc&) {
  }
  try {
    leave({.loss = Loss::failed, .text = end_->error.message}, end_->error);
  } catch (const std::exception&) {
  }
}

bool ProcessSet::turn() noexcept {
  bool progressed = false;
  if (!said_farewell_) guarded([&] { progressed = advance(); });
  if (said_farewell_) advance_farewell();
  return progressed;
}

bool ProcessSet::advance() {
  bool progressed = neighbours_.receive(negotiation_);
  neighbours_.send(negotiation_);
  apply_decisions();
  progressed |= advance_plane();
  end_plane();
  if (progressed) {
    last_progress_ = Clock::now();
  } else {
    const auto [asks, lost] = stall_watch_.inspect();
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
    const bool expects_notes = last_note_ && Clock::now() - *last_note_ < kNotesExpected;
    at_most(expects_notes ? Nanoseconds(kLongestNap) : Nanoseconds(kIdleNap));
  }
  if (config_.mpi && neighbours_.has_unsent()) at_most(kLongestNap);
  if (broken_) at_most(kNewsTime);
  if (failure_ && !said_farewell_) at_most(kLongestNap);
  if (plane_ && plane_->oldest_launched() != nullptr) at_most(kWatchNap);
  if (const auto watch = stall_watch_.nap()) at_most(*watch);
  return nap;
}

// A host is named by its first rank.
std::string ProcessSet::describe_sent() const {
  std::string text = "within\t" + std::to_string(config_.sent->within_host) + "\n";
  for (const std::vector<int>& host : config_.hosts) {
    uint64_t bytes = 0;
    for (const int index : host) bytes += config_.sent->to[static_cast<size_t>(number_of(config_.world_rank(index)))];
    if (bytes == 0) continue;
    const std::string first = std::to_string(number_of(config_.world_rank(host.front())));
    text += "sent\t" + first + "\t" + std::to_string(bytes) + "\n";
  }
  return text;
}

void ProcessSet::submit(const std::shared_ptr<Operation>& operation) noexcept {
  guarded([&] {
    if (operation->request->is_transfer()) return pairs_.submit(operation);
    if (!end_) return operations_.submit(operation);
    operation->trace_submission(Clock::now());
    // A run that failed before the ranks parted names its own cause.
    const Error* const earlier = operations_.failure_of(operation->request->family);
    settle(operation, earlier != nullptr ? earlier : &end_->error);
  });
  // If the table had stored the operation, leave_if_failed() has failed it already.
  if (failure_ && !operation->handle->settled()) settle(operation, &end_->error);
}

void ProcessSet::state(const std::shared_ptr<Operation>& operation) {
  const Clock::time_point now = Clock::now();
  operation->since = now;
  engine_.stated(*operation, now);
  stall_watch_.submitted(*operation, now);
  operation->trace_submission(now);
  if (operation->request->kind == Kind::join) return negotiation_.join();
  negotiation_.set_now(shared_seconds(now));
  negotiation_.submit(operation->request->name, *operation->signature, operation->absent, carried_.of(*operation));
}

void ProcessSet::settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept {
  engine_.settle(operation, error);
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
    if (!std::holds_alternative<Note>(*next)) stall_watch_.decided(now);
    std::visit([&](const auto& decision) { apply(decision, now); }, *next);
  }
  if (question_) answer_question(now);
}

void ProcessSet::apply(const Note& note, Clock::time_point now) {
  switch (note.topic) {
    case Note::Topic::status:
      return stall_watch_.on_status(note);
    case Note::Topic::ask_launch: {
      Note launch = note;
      launch.topic = Note::Topic::launch;
      negotiation_.note_to_all(launch);
      return neighbours_.send(negotiation_);
    }
    case Note::Topic::launch:
      neighbours_.nudge_children();
      last_note_ = now;
      return engine_.launch_order_.announced(note.process_set, note.decision);
    case Note::Topic::ask_status:
    case Note::Topic::ask_status_of_gpus:
      neighbours_.nudge_children();
      question_ = note.topic;
  }
}

void ProcessSet::apply(const Fail& failed, Clock::time_point) {
  operations_.fail(failed.name, failed.text, failed.families);
}

void ProcessSet::apply(const Joined& joined, Clock::time_point now) {
  if (end_) return;  // this rank has given up, and the deciding ranks did not know yet
  operations_.join()->trace.decided(now);
  operations_.end_join(joined.last_rank);
}

// Answers only after this rank has carried out all decisions that it knows. An answer between two of them would be
// wrong.
void ProcessSet::answer_question(Clock::time_point now) {
  const bool about_gpus = *std::exchange(question_, std::nullopt) == Note::Topic::ask_status_of_gpus;
  const bool waits =
      operations_.busy() && operations_.executing().empty() && !pairs_.busy() && engine_.submits_nothing(config_.id);
  stall_watch_.on_status_question(about_gpus, waits || operations_.join(), now);
  apply_decisions();
}

void ProcessSet::apply(const DecidedCollective& decided, Clock::time_point now) {
  if (end_) return;
  const auto operation =
      decided.submitted() ? operations_.begin(decided.name, decided.number) : operation_for_joined(decided, now);
  operation->absent = decided.absent;
  const bool over_size = options_.averages_over_size && operation->request->kind == Kind::allreduce;
  operation->contributors = static_cast<int>(config_.ranks.size()) - (over_size ? 0 : decided.joined_ranks);
  operation->any_joined = decided.joined_ranks > 0;
  const auto root = std::ranges::find(config_.ranks, operation->request->root);
  operation->root = static_cast<int>(root - config_.ranks.begin());
  operation->trace.decided(now);
  if (operation->request->kind == Kind::broadcast && root == config_.ranks.end()) {
    const Error error{ErrorKind::internal, "root_rank=" + std::to_string(number_of(operation->request->root)) +
                                               " is not in the process set. Remedy: name one of its ranks."};
    operations_.end(operation, &error);
  } else if (carried_.finish(*operation, decided.values)) {
    operations_.end(operation, nullptr);
  } else {
    plane_->start(operation);
  }
  operations_.submit_next(decided.name);
}

// The part of a rank that has joined.
std::shared_ptr<Operation> ProcessSet::operation_for_joined(const DecidedCollective& decided, Clock::time_point now) {
  const auto& join = operations_.join();
  if (!join) throw OperationTable::unexpected(decided.name);
  const auto request = std::make_shared<Request>(Request::decode(decided.signature));
  if (!request->on_host() && !join->request->on_host()) request->device = join->request->device;
  Buffer none;
  if (request->any_rows()) none.rows.assign(request->kind == Kind::allgather ? 1 : config_.ranks.size(), 0);
  auto operation = operation_of(request, std::vector(request->members.size(), none), join->process_set,
                                std::make_shared<Handle>(0), std::make_shared<const std::string>(decided.signature));
  operation->trace = {join->trace.timeline};
  operation->trace_submission(now);
  operation->decision = decided.number;
  operations_.begin_for_joined(operation);
  return operation;
}

void ProcessSet::send_note(const Note& note) noexcept {
  guarded([&] {
    negotiation_.note_to_root(note);
    exchange();
  });
}

bool ProcessSet::advance_plane() {
  if (broken_) {
    if (!end_ && Clock::now() - broken_->since > kNewsTime)
      fail_everywhere({.loss = Loss::failed, .text = broken_->text});
    return false;
  }
  try {
    const bool moved = plane_ && plane_->advance();
    if (moved) stall_watch_.moved();
    return pairs_.advance() || moved;
  } catch (const std::bad_alloc&) {
    throw;  // no news will explain it
  } catch (const std::exception&) {
    broken_ = {Clock::now(), text_of(config_.own_rank(), std::current_exception())};
    if (end_) pairs_.abandon(end_->error);
    return false;
  }
}

void ProcessSet::end(const std::shared_ptr<Operation>& operation, const Error* error) {
  if (operation->inner) return operation->inner();
  operations_.end(operation, error);
}

// The number of decisions that this rank has carried out.
uint64_t ProcessSet::finished() const {
  const auto& executing = operations_.executing();
  return executing.empty() ? negotiation_.decisions_seen() : executing.begin()->first - 1;
}

// If several ranks are lost, all calls name the first loss.
void ProcessSet::apply(const Lost& lost, Clock::time_point now) {
  end_without_lost_ranks(lost.loss);
  const size_t end = std::min(lost.text.find(kRemedy), lost.text.size());
  const std::string what = lost.text.substr(0, end);
  if (!end_) end_ = {0, {kind_of(lost.loss), what, lost.text.substr(end)}};
  end_->decision = lost.finished;
  end_->wait_until = in_order(lost.loss) ? now + kDrainLimit : Clock::time_point{};
  engine_.decisions_ended(config_.id, lost.loss, what);
  operations_.abandon_undecided(end_->error);
  const bool may_arrive = in_order(lost.loss) && config_.mpi && !broken_;
  pairs_.end(end_->error, now + (may_arrive ? kArrivalLimit : Clock::duration::zero()));
  end_plane();
}

// After the loss of a rank: operations complete if that rank has done its part in them. Then the rest ends, and the
// plane with it.
void ProcessSet::end_plane() {
  if (!end_ || !plane_ || (!broken_ && finished() < end_->decision)) return;
  const bool waits = !broken_ && plane_->oldest_launched() != nullptr && operations_.executing().empty();
  if (waits && Clock::now() < end_->wait_until) return;
  end_plane_because_of(end_->error);
  operations_.abandon_executing(end_->error);
}

void ProcessSet::end_plane_because_of(const Error& error) {
  if (!plane_) return;
  code_reports_ = plane_->code_reports();
  plane_->about_to_end(error);
  plane_.reset();
}

// For a loss that this rank knows and its parent may not be able to pass on.
void ProcessSet::fail_everywhere(const Lost& lost) {
  negotiation_.lost(lost);
  negotiation_.parent_lost(lost);
  neighbours_.send(negotiation_);
  apply_decisions();
}

void ProcessSet::leave(bool failed, const std::string& reason) noexcept {
  guarded([&] {
    if (said_farewell_) return;
    const Error error{ErrorKind::engine_stopped, "shutdown() was called on " + horovodish::text_of(config_.own_rank()) +
                                                     " while the operation was pending"};
    if (plane_ && !failed) plane_->drain(kDrainLimit);
    leave({failed ? Loss::failed : Loss::left, finished(), reason}, error);
  });
}

void ProcessSet::retire(const std::string& reason) noexcept {
  guarded([&] {
    if (said_farewell_) return;
    if (!end_) end_ = {0, {ErrorKind::internal, reason}};
    leave({Loss::retired, finished(), reason}, end_->error);
    pairs_.end(end_->error, {});  // unlike after stop(), other threads may still submit, which must fail at once
  });
}

void ProcessSet::leave(const Lost& lost, const Error& error) {
  end_plane_because_of({ErrorKind::rank_lost, lost.text});
  operations_.abandon_undecided(error);
  operations_.abandon_executing(error);
  pairs_.abandon(error);
  neighbours_.send_farewell(lost);
  said_farewell_ = true;
}

bool ProcessSet::advance_farewell() noexcept {
  leave_if_failed();
  try {
    return neighbours_.advance_farewell() && said_farewell_;
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace horovodish
