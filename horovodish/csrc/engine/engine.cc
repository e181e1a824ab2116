#include "engine/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "memory/waiting_costs.h"
#include "operation/warning.h"

namespace horovodish {

namespace {

// Farewells that peers do not take within this time are dropped.
constexpr std::chrono::seconds kFarewellLimit{1};
// Between hosts, a farewell follows all data that MPI has taken from this rank but not sent yet. MPI moves the data
// only while it is called, and nobody calls MPI after stop(). A peer takes the farewell within milliseconds unless its
// process is stopped. Only neighbours in the negotiation tree are covered: data for other ranks may stay with MPI until
// its next call.
constexpr std::chrono::seconds kTransferLimit{3};
constexpr std::chrono::microseconds kFarewellNap{20};
// How many errors the engine keeps. A framework passes on the error of one operation of a step, and each bucket of the
// step is an operation.
constexpr size_t kFailures = 64;
// How long the removal of a process set waits for the operations that were launched in it.
constexpr std::chrono::seconds kRemovalLimit{10};
// How long the end of the process waits for threads that are on their way back to Python, which takes microseconds.
constexpr std::chrono::seconds kReturnLimit{1};
constexpr std::chrono::microseconds kReturnNap{50};

// For sends and receives in a process set after a rank has left it without an error.
constexpr std::string_view kEndedRemedy =
    "\nRemedy: call hvd.barrier() at the end of the script. A rank that ends also ends its process sets on the other "
    "ranks.";

// The process set checks the names of family members: it knows which runs have failed. The name of a send or a receive
// appears only in messages: rank and tag say which send belongs to which receive.
bool holds_name(const Request& request) {
  return request.refusal.empty() && request.family.name.empty() && !request.is_transfer();
}
bool has_caller(const Operation& operation) { return operation.handle->id() != 0; }

std::atomic<uint64_t> forks{0};

// The number of forks between the process that loaded the engine and this one. Each operation would need several calls
// of getpid(), which is a system call.
uint64_t forks_so_far() {
  static const bool counted = pthread_atfork(nullptr, nullptr, [] { ++forks; }) == 0;
  if (!counted) throw std::bad_alloc();
  return forks;
}

}  // namespace

Engine::Engine(EngineConfig config) : config_(std::move(config)), forks_(forks_so_far()) {
  sent_.to.resize(static_cast<size_t>(config_.size));
  const size_t local_ranks = config_.arena_memory.size();
  if (local_ranks > 0) {
    arena_ = std::make_shared<Arena>(std::exchange(config_.arena_memory, {}), config_.local_rank,
                                     EngineConfig::arena_layout(local_ranks, config_.options.chunk_bytes));
    doorbell_ = {arena_, &arena_->doorbell(config_.local_rank)};
    peer_deaths_ = std::make_unique<PeerDeaths>(config_.peer_sockets, *doorbell_);
  }
  if (config_.size > 1) {
    waiting_costs();
    if (config_.has_thread) start_thread();
  }
}

Engine::~Engine() { stop(false, text_of(config_.rank) + " left"); }

void Engine::add_process_set(int id, ProcessSetConfig config, StallInspector::Seconds longest_wait) {
  config.sent = &sent_;
  if (config.mpi) {
    config.mpi->resolve();
    config.mpi->sent_bytes = &sent_.to;
  }
  EngineOptions options = config_.options;
  if (longest_wait.count() > 0) {
    auto& shutdown = options.stall.shutdown;
    shutdown = shutdown.count() > 0 ? std::min(shutdown, longest_wait) : longest_wait;
  }
  config.id = id;
  RankInGroup place{config.own, static_cast<int>(config.ranks.size())};
  for (const WorldRank rank : config.ranks) {
    place.ranks += (place.ranks.empty() ? "" : ",") + std::to_string(number_of(rank));
  }
  std::shared_ptr<Doorbell> doorbell;
  {
    const std::lock_guard hold(seat_);
    doorbell = doorbell_;
    {
      std::lock_guard lock(inbox_mutex_);
      check_open("process set " + std::to_string(id));
    }
    if (process_sets_.contains(id)) {
      throw std::invalid_argument("process set " + std::to_string(id) + " exists already");
    }
    process_sets_[id] = std::make_unique<ProcessSet>(std::move(config), options, *this);
  }
  {
    std::lock_guard lock(inbox_mutex_);
    uses_[id].place = std::move(place);
  }
  doorbell->wake_engine();  // a set that lives on several hosts limits its sleep
}

// The caller holds inbox_mutex_. `what`: the refused call, for the message.
void Engine::check_open(const std::string& what) {
  if (!closed_) return;
  refused_ = true;
  throw EngineStopped(what + ": the engine has been shut down");
}

bool Engine::process_set_busy(int id) {
  std::lock_guard lock(inbox_mutex_);
  const auto use = uses_.find(id);
  return use != uses_.end() && use->second.under_way > 0;
}

void Engine::remove_process_set(int id) {
  {
    const std::lock_guard hold(seat_);
    take_submissions();
    process_set(id);
    std::lock_guard lock(inbox_mutex_);
    if (uses_[id].under_way > 0) {
      throw std::invalid_argument("process set " + std::to_string(id) + " has operations under way on " +
                                  text_of(config_.rank) + ". Remedy: synchronize them before you remove the set.");
    }
    uses_.erase(id);  // other threads' submissions to the set fail from now on
  }
  wait_for_gpu(launched(), Clock::now() + kRemovalLimit);
  const std::lock_guard hold(seat_);
  process_sets_.erase(id);
  looks_.erase(id);
}

void Engine::retire(int process_set, const std::string& reason) {
  const std::lock_guard hold(seat_);
  take_submissions();
  this->process_set(process_set).retire(reason);
}

RankInGroup Engine::place(int process_set) {
  std::lock_guard lock(inbox_mutex_);
  const auto use = uses_.find(process_set);
  return use == uses_.end() ? RankInGroup{} : use->second.place;
}

void Engine::clear_region(size_t region) {
  const std::lock_guard hold(seat_);
  if (arena_) arena_->clear(region);
}

// A forked process has neither the threads nor the memory of the engine.
bool Engine::is_forked() const { return forks != forks_; }

void Engine::check_process() const {
  if (!is_forked()) return;
  throw EngineError(ErrorKind::forked_process,
                    "process " + std::to_string(getpid()) + " was forked from " + text_of(config_.rank) +
                        " and cannot use its engine. Remedy: use horovodish only in the process that called init().");
}

void Engine::hold_other_threads() {
  ends_process_ = std::this_thread::get_id();
  const Clock::time_point limit = Clock::now() + kReturnLimit;
  while (entering_python_ > 0 && Clock::now() < limit) Clock::sleep(kReturnNap);
}

void Engine::stop_here_if_exiting() const {
  enter_python();
  entered_python();
}

void Engine::enter_python() const {
  ++entering_python_;
  const std::thread::id ends = ends_process_;
  if (ends == std::thread::id{} || ends == std::this_thread::get_id()) return;
  --entering_python_;
  while (true) pause();
}

void Engine::enqueue(std::shared_ptr<Operation> operation, bool waits) {
  check_process();
  const Request& request = *operation->request;
  std::shared_ptr<Doorbell> doorbell;
  {
    std::lock_guard lock(inbox_mutex_);
    check_open(subject_of(request));
    // Do first what the system may refuse: an operation that is not enqueued has no name and is not counted.
    if (operation->then) completion_threads_->prepare();
    if (inbox_.size() == inbox_.capacity()) inbox_.reserve(2 * inbox_.size() + 1);
    // Work that NCCL has begun goes on even if nobody waits for it.
    if (!request.on_host() && !thread_.joinable()) start_thread();
    Use& use = uses_[operation->process_set];
    if (holds_name(request) && !use.names.insert(request.name).second) {
      throw EngineError(ErrorKind::duplicate_name,
                        subject_of(request) + " on " + text_of(config_.rank) + ": " + kNameInUse);
    }
    use.under_way += has_caller(*operation);
    // A caller that is about to wait drives the engine. The engine then reads the time when it takes the operation from
    // the inbox.
    if (timeline_) operation->trace = {timeline_, waits ? 0 : Timeline::now()};
    operation->handle->process_set = operation->process_set;
    inbox_.push_back(std::move(operation));
    has_submissions_.store(true, std::memory_order_release);
    doorbell = doorbell_;
  }
  if (config_.size == 1) {  // nobody to wait for
    const std::lock_guard hold(seat_);
    while (turn()) {
    }
    if (awaits_news()) doorbell->wake_engine();
  } else if (waits) {
    doorbell->ring_caller();
  } else {
    doorbell->ring_own();
  }
}

void Engine::refuse(Kind kind, const std::string& name, int process_set, const std::string& why, Family family) {
  // In a join, ranks wait for ranks, not for an operation of that name. A send or a receive fails on this rank alone.
  if (kind == Kind::join || kind == Kind::send || kind == Kind::receive) return;
  enqueue(refusal_of(kind, name, process_set, why, std::move(family)), false);
}

bool Engine::cancel(const Handle& handle) {
  check_process();
  const std::lock_guard hold(seat_);
  take_submissions();
  const auto found = process_sets_.find(handle.process_set);
  return found != process_sets_.end() && found->second->cancel(handle);
}

std::map<WorldRank, Lateness> Engine::lateness(int process_set) {
  const std::lock_guard hold(seat_);
  return this->process_set(process_set).lateness();
}

std::vector<Residuals::Report> Engine::code_reports(int process_set) {
  const std::lock_guard hold(seat_);
  return this->process_set(process_set).code_reports();
}

uint64_t Engine::full_requests(int process_set) {
  const std::lock_guard hold(seat_);
  return this->process_set(process_set).full_requests();
}

// The caller holds the seat.
ProcessSet& Engine::process_set(int id) {
  const auto found = process_sets_.find(id);
  if (found == process_sets_.end()) throw std::invalid_argument("there is no process set " + std::to_string(id));
  return *found->second;
}

void Engine::start_timeline(const std::shared_ptr<Timeline>& timeline) {
  std::lock_guard lock(inbox_mutex_);
  if (timeline_) throw std::invalid_argument("a timeline is being recorded already");
  if (!closed_) timeline_ = timeline;
  records_waits_ = timeline_ != nullptr;
}

void Engine::stop_timeline() {
  const auto timeline = take_timeline();
  if (!timeline) throw std::invalid_argument("no timeline is being recorded");
  timeline->finish();
}

void Engine::begin_step() {
  const uint64_t step = ++steps_;
  if (!is_forked()) page_->steps.store(step, std::memory_order_relaxed);  // a fork does not have the page
  record("step " + std::to_string(step), true);
}

void Engine::go_on_from_step(uint64_t steps) noexcept {
  uint64_t own = steps_;
  while (own < steps && !steps_.compare_exchange_weak(own, steps)) {
  }
}

void Engine::mark(const std::string& name) { record(name, false); }

void Engine::record(const std::string& name, bool begins_step) {
  const int64_t at = Timeline::now();
  std::lock_guard lock(inbox_mutex_);
  if (timeline_) timeline_->add({name, at, begins_step});
}

// Operations under way keep a share of the timeline that records them.
std::shared_ptr<Timeline> Engine::take_timeline() {
  std::lock_guard lock(inbox_mutex_);
  records_waits_ = false;
  return std::exchange(timeline_, nullptr);
}

std::string Engine::loss() {
  std::lock_guard lock(inbox_mutex_);
  if (!loss_.empty()) return loss_;
  return launched_operations_.any_lost() ? launched_operations_.loss()->message : death_;
}

std::deque<std::pair<Error, bool>> Engine::failures() {
  std::lock_guard lock(inbox_mutex_);
  return failures_;
}

void Engine::stop(bool failed, const std::string& reason) noexcept {
  {
    std::lock_guard lock(inbox_mutex_);
    if (closed_) return;
    closed_ = true;
  }
  status_door_.reset();
  std::shared_ptr<Doorbell> doorbell;  // also keeps the arena while threads of this engine may use it
  {
    const std::lock_guard hold(seat_);
    take_submissions();
    for (auto& [id, set] : process_sets_) set->leave(failed, reason);
    const bool holds_data =
        std::ranges::any_of(process_sets_, [](const auto& entry) { return entry.second->may_hold_data(); });
    const Clock::time_point limit = Clock::now() + (holds_data && !failed ? kTransferLimit : kFarewellLimit);
    while (!farewells_sent() && Clock::now() < limit) Clock::sleep(kFarewellNap);
    stopping_ = true;
    process_sets_.clear();
    std::lock_guard lock(inbox_mutex_);
    doorbell = std::exchange(doorbell_, own_doorbell_);
  }
  doorbell->wake_engine();
  if (thread_.joinable()) thread_.join();
  if (!failed) warn_of_lost_operations();
  peer_deaths_.reset();
  if (const auto timeline = take_timeline()) timeline->finish();
  completion_threads_.reset();
  const std::lock_guard hold(seat_);
  arena_.reset();  // handles and plans that Python still holds keep the engine, but not the memory
}

// For stop(): no later call can raise this error.
void Engine::warn_of_lost_operations() const noexcept {
  if (loss_raised_ || !launched_operations_.any_lost()) return;
  try {
    warn(launched_operations_.loss()->message);
  } catch (const std::bad_alloc&) {
  }
}

// A set with a slow peer must not delay the farewells of the other sets: their peers would take this rank for dead.
bool Engine::farewells_sent() {
  bool all = true;
  for (auto& [id, set] : process_sets_) all &= set->advance_farewell();
  return all;
}

// A rank that has joined does not know what others have reduced since, until its join() returns.
void Engine::count(const Operation& operation) noexcept {
  const Request& request = *operation.request;
  size_t bytes = 0;
  for (const Member& member : request.members) {
    if (member.count() > 1) bytes += row_bytes(member);
  }
  if (has_caller(operation) && (request.kind == Kind::allreduce || request.kind == Kind::reducescatter)) {
    reduced_bytes_ += bytes;
    page_->reduced_bytes.store(reduced_bytes_, std::memory_order_relaxed);
  }
  if (operation.process_set != 0 || request.is_transfer()) return;  // some ranks have more of these than others
  if (request.kind == Kind::join) {
    completed_ += completed_while_joined_.exchange(0);
  } else if (bytes > 0) {
    ++(has_caller(operation) ? completed_ : completed_while_joined_);
  }
}

void Engine::decisions_ended(int process_set, Loss loss, const std::string& why) {
  if (process_set == 0) launch_order_.end(why);
  if (loss != Loss::failed) return;
  std::lock_guard lock(inbox_mutex_);
  if (death_.empty()) death_ = why;
}

void Engine::settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept {
  ++news_;
  if (operation->since != Clock::time_point{}) page_->ended.fetch_add(1, std::memory_order_relaxed);
  operation->trace.settled(error != nullptr);
  Error failure = error != nullptr ? described(*operation, *error) : Error{};
  if (error != nullptr && has_caller(*operation)) operation->trace.mark(failure.message);
  {
    // Done before the handle is settled, so that whoever waits for the handle may use the name again.
    std::lock_guard lock(inbox_mutex_);
    if (const auto use = uses_.find(operation->process_set); use != uses_.end()) {
      if (holds_name(*operation->request)) use->second.names.erase(operation->request->name);
      use->second.under_way -= has_caller(*operation);
    }
    try {
      if (error != nullptr && error->kind == ErrorKind::rank_lost) loss_ = error->message;
      // The refused call has raised its error already.
      if (error != nullptr && has_caller(*operation)) failures_.emplace_back(failure, operation->in_program);
      if (failures_.size() > kFailures) failures_.pop_front();
    } catch (const std::bad_alloc&) {  // the loss then has no text
    }
  }
  operation->memory.reset();
  if (error != nullptr) {
    if (error->kind == ErrorKind::rank_lost || error->kind == ErrorKind::stalled) loss_raised_ = true;
    if (error->kind == ErrorKind::engine_stopped) refused_ = true;
    operation->handle->fail(std::move(failure), std::move(operation->done));
  } else {
    count(*operation);
    operation->handle->complete(std::move(operation->done));
  }
  if (operation->then && operation.get() != driven_) completion_threads_->run(operation);
  seat_.announce_change();
}

Error Engine::described(const Operation& operation, const Error& error) const noexcept {
  try {
    const bool waited = error.kind == ErrorKind::rank_lost || error.kind == ErrorKind::stalled;
    const uint64_t step = waited ? steps() : 0;
    // If the lost rank left after this number of steps, it has reduced the gradients of this step, and the operations
    // that wait for it come after them.
    const std::string after = " after " + std::to_string(step) + (step == 1 ? " step" : " steps");
    const std::string in_step = error.message.ends_with(after) ? after : " in step " + std::to_string(step);
    const bool ended = operation.request->is_transfer() && !error.remedy.empty();
    return {error.kind, subject_of(*operation.request) + " failed on " + text_of(config_.rank) +
                            (step == 0 ? "" : in_step) + ": " + error.message +
                            std::string(ended ? kEndedRemedy : error.remedy)};
  } catch (const std::bad_alloc&) {
    return {error.kind, kOutOfMemory};
  }
}

}  // namespace horovodish
