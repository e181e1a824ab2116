#include "engine.h"

#include <algorithm>

#include "thread_setup.h"

namespace horovodish {

namespace {

// Farewells that peers do not take within this time are dropped.
constexpr std::chrono::seconds kFarewellLimit{1};
constexpr std::chrono::microseconds kFarewellNap{20};
// MPI moves data while it is asked. A caller that napped between two segments would hold up both ends of the connection:
// 64 MiB between two hosts then take 1.5 times as long.
constexpr std::chrono::milliseconds kPollingSpin{2};
constexpr std::chrono::hours kForEver{24};
// How long the end of the process waits for threads that are on their way back to Python, which takes microseconds.
constexpr std::chrono::seconds kReturnLimit{1};
constexpr std::chrono::microseconds kReturnNap{50};

// What belongs to a family is looked at by its process set, in the order in which this rank hears of failures.
bool holds_name(const Request& request) { return request.refusal.empty() && request.family.name.empty(); }

}  // namespace

Engine::Engine(EngineConfig config) : config_(std::move(config)) {
  const size_t local_ranks = config_.arena_memory.size();
  if (local_ranks > 0) {
    arena_ = std::make_unique<Arena>(std::exchange(config_.arena_memory, {}), config_.local_rank,
                                     EngineConfig::arena_layout(local_ranks, config_.options.chunk_bytes));
    doorbell_ = &arena_->header(config_.local_rank).doorbell;
    peer_watch_ = std::make_unique<PeerWatch>(config_.peer_sockets, [this] { doorbell_->ring_own(); });
  }
  if (config_.size > 1) start_thread();
}

Engine::~Engine() { stop(false, "rank " + std::to_string(config_.rank) + " has left"); }

void Engine::add_process_set(int id, ProcessSetConfig config) {
  if (config.mpi) config.mpi->resolve();
  config.id = id;
  const auto on_settled = [this](const std::shared_ptr<Operation>& operation, const Error* error) {
    settle(operation, error);
  };
  Place place{config.own, static_cast<int>(config.ranks.size())};
  for (const int rank : config.ranks) place.ranks += (place.ranks.empty() ? "" : ",") + std::to_string(rank);
  const auto ask_turn = [this](int set, uint64_t decision) { process_set(0).ask_turn(set, decision); };
  const auto give_turn = [this](int set, uint64_t decision) {
    if (process_sets_.contains(set)) launch_order_.add(set, decision);
  };
  {
    const SeatHold hold(seat_);
    if (process_sets_.contains(id)) {
      throw std::invalid_argument("process set " + std::to_string(id) + " exists already");
    }
    process_sets_[id] = std::make_unique<ProcessSet>(std::move(config), config_.options, arena_.get(),
                                                     peer_watch_.get(), launch_order_, on_settled, ask_turn, give_turn);
  }
  {
    std::lock_guard lock(inbox_mutex_);
    places_[id] = std::move(place);
  }
  doorbell_->wake_engine();  // a set that lives on several hosts limits its sleep
}

bool Engine::process_set_busy(int id) {
  const SeatHold hold(seat_);
  take_submissions();
  const auto found = process_sets_.find(id);
  return found != process_sets_.end() && found->second->busy();
}

void Engine::remove_process_set(int id) {
  const SeatHold hold(seat_);
  take_submissions();
  const auto found = process_sets_.find(id);
  if (found == process_sets_.end()) throw std::invalid_argument("there is no process set " + std::to_string(id));
  if (found->second->busy()) {
    throw std::invalid_argument("process set " + std::to_string(id) + " has operations under way on rank " +
                                std::to_string(config_.rank) + ". Remedy: synchronize them before it is removed.");
  }
  process_sets_.erase(found);
  std::lock_guard lock(inbox_mutex_);
  names_in_flight_.erase(id);
  places_.erase(id);
}

Place Engine::place(int process_set) {
  std::lock_guard lock(inbox_mutex_);
  const auto found = places_.find(process_set);
  return found == places_.end() ? Place{} : found->second;
}

void Engine::clear_region(size_t region) {
  if (arena_) arena_->clear(region);
}

// The threads and the memory of the engine stay behind in a fork.
void Engine::check_process() const {
  if (getpid() == process_) return;
  throw ForkedProcess("process " + std::to_string(getpid()) + " was forked from rank " + std::to_string(config_.rank) +
                      " and cannot use its engine. Remedy: use horovodish in the process that called init() only.");
}

void Engine::hold_other_threads() {
  ends_process_ = std::this_thread::get_id();
  const Clock::time_point limit = Clock::now() + kReturnLimit;
  while (returning_ > 0 && Clock::now() < limit) std::this_thread::sleep_for(kReturnNap);
}

void Engine::hold_at_exit() const {
  begin_return();
  end_return();
}

void Engine::begin_return() const {
  ++returning_;
  const std::thread::id ends = ends_process_;
  if (ends == std::thread::id{} || ends == std::this_thread::get_id()) return;
  --returning_;
  while (true) std::this_thread::sleep_for(kForEver);
}

std::shared_ptr<Operation> Engine::make_operation(std::shared_ptr<const Request> request, std::vector<Buffer> buffers,
                                                  int process_set) {
  auto operation = std::make_shared<Operation>();
  operation->process_set = process_set;
  operation->signature = std::make_shared<const std::string>(request->signature());
  operation->request = std::move(request);
  operation->buffers = std::move(buffers);
  operation->handle = make_handle();
  return operation;
}

void Engine::enqueue(std::shared_ptr<Operation> operation, bool waits) {
  check_process();
  const Request& request = *operation->request;
  {
    std::lock_guard lock(inbox_mutex_);
    if (closed_) throw EngineStopped(subject_of(request) + ": the engine has been shut down");
    if (holds_name(request) && !names_in_flight_[operation->process_set].insert(request.name).second) {
      throw DuplicateName(subject_of(request) + " on rank " + std::to_string(config_.rank) + ": " + kNameInUse);
    }
    under_way_ += operation->handle->id() != 0;
    // A caller that is about to wait drives the engine, which takes the time anyway when it takes the operation up.
    if (timeline_) operation->trace = {timeline_, waits ? 0 : Timeline::now()};
    // What NCCL has begun goes on also when nobody waits for it.
    if (!request.on_host() && !thread_.joinable()) start_thread();
    inbox_.push_back(std::move(operation));
    has_submissions_.store(true, std::memory_order_release);
  }
  if (config_.size == 1) {  // nobody to wait for
    const SeatHold hold(seat_);
    while (turn()) {
    }
    if (awaits_news()) doorbell_->wake_engine();
  } else if (waits) {
    doorbell_->ring_caller();
  } else {
    doorbell_->ring_own();
  }
}

void Engine::enqueue_and_drive(const std::shared_ptr<Operation>& operation, std::chrono::nanoseconds limit) {
  hold_at_exit();
  const bool drives = config_.size > 1 && nothing_submitted();
  enqueue(operation, drives);
  if (!drives) return;
  if (!seat_.take_if_free()) {
    doorbell_->ring_own();
    return;
  }
  driven_ = operation.get();
  drive_until(*operation->handle, Clock::now() + limit);
  driven_ = nullptr;
  const auto then = operation->handle->settled() ? std::move(operation->then) : nullptr;
  leave_seat();
  hold_at_exit();
  if (then) then(*operation->handle);
}

bool Engine::nothing_submitted() {
  std::lock_guard lock(inbox_mutex_);
  return under_way_ == 0;
}

void Engine::refuse(Kind kind, const std::string& name, int process_set, const std::string& why, Family family) {
  if (kind == Kind::join) return;  // it is the ranks that are waited for, not an operation of its name
  enqueue(refusal_of(kind, name, process_set, why, std::move(family)), false);
}

bool Engine::wait(const Handle& handle, std::chrono::nanoseconds limit) {
  if (handle.settled()) return true;
  check_process();
  const Clock::time_point deadline = Clock::now() + limit;
  if (seat_.take_as_caller(deadline, [&] { return handle.settled(); })) {
    drive_until(handle, deadline);
    leave_seat();
  }
  return handle.settled();
}

std::map<int, Lateness> Engine::lateness(int process_set) {
  const SeatHold hold(seat_);
  return this->process_set(process_set).lateness();
}

uint64_t Engine::full_requests(int process_set) {
  const SeatHold hold(seat_);
  return this->process_set(process_set).full_requests();
}

// The caller holds the seat.
ProcessSet& Engine::process_set(int id) {
  const auto found = process_sets_.find(id);
  if (found == process_sets_.end()) throw std::invalid_argument("there is no process set " + std::to_string(id));
  return *found->second;
}

void Engine::start_timeline(TimelineConfig config) {
  const auto timeline = std::make_shared<Timeline>(std::move(config));
  std::lock_guard lock(inbox_mutex_);
  if (timeline_) throw std::invalid_argument("a timeline is being recorded already");
  if (!closed_) timeline_ = timeline;
}

void Engine::stop_timeline() {
  const auto timeline = take_timeline();
  if (!timeline) throw std::invalid_argument("no timeline is being recorded");
  timeline->finish();
}

// Operations under way go on holding what they are recorded in.
std::shared_ptr<Timeline> Engine::take_timeline() {
  std::lock_guard lock(inbox_mutex_);
  return std::exchange(timeline_, nullptr);
}

std::vector<uint64_t> Engine::take_settled() {
  std::lock_guard lock(inbox_mutex_);
  // They come in the order of the stream.
  const auto busy =
      std::find_if(on_device_.begin(), on_device_.end(), [](auto& entry) { return !entry.second->done(); });
  for (auto done = on_device_.begin(); done != busy; ++done) settled_.push_back(done->first);
  on_device_.erase(on_device_.begin(), busy);
  return std::exchange(settled_, {});
}

void Engine::stop(bool failed, const std::string& reason) {
  {
    std::lock_guard lock(inbox_mutex_);
    if (closed_) return;
    closed_ = true;
  }
  {
    const SeatHold hold(seat_);
    take_submissions();
    const Error error{ErrorKind::engine_stopped, "shutdown() was called on rank " + std::to_string(config_.rank) +
                                                     " while the operation was pending"};
    for (auto& [id, set] : process_sets_) set->leave(failed, reason, error);
    const Clock::time_point limit = Clock::now() + kFarewellLimit;
    const auto sent = [](auto& entry) { return entry.second->advance_farewell(); };
    while (!std::all_of(process_sets_.begin(), process_sets_.end(), sent) && Clock::now() < limit) {
      std::this_thread::sleep_for(kFarewellNap);
    }
    stopping_ = true;
    process_sets_.clear();
  }
  doorbell_->wake_engine();
  if (thread_.joinable()) thread_.join();
  peer_watch_.reset();
  if (const auto timeline = take_timeline()) timeline->finish();
  completion_threads_.reset();
  // Handles and plans that Python still holds keep the engine, but not the memory.
  doorbell_ = &own_doorbell_;
  arena_.reset();
}

void Engine::start_thread() {
  thread_ = std::thread([this] { run(); });
}

void Engine::run() {
  set_up_thread("horovodish");
  while (!stopping_) {
    seat_.take_as_engine();
    doorbell_->announce(Doorbell::nobody);
    while (!stopping_ && !seat_.callers_waiting() && turn()) {
    }
    const uint32_t value = doorbell_->value();
    doorbell_->announce(awaits_news() ? Doorbell::engine : Doorbell::indifferent);
    const bool again = stopping_ || seat_.callers_waiting() || turn();
    const auto limit = nap();
    seat_.leave();
    if (!again) doorbell_->sleep(value, Doorbell::engine, limit);
  }
}

void Engine::drive_until(const Handle& handle, Clock::time_point deadline) {
  doorbell_->announce(Doorbell::nobody);
  Clock::time_point idle_since{};
  while (!handle.settled()) {
    if (turn()) {
      idle_since = {};
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) return;
    if (idle_since == Clock::time_point{}) idle_since = now;
    if (now - idle_since < spin()) {
      pause_processor();
      continue;
    }
    for (auto& [id, set] : process_sets_) set->flush();
    const uint32_t value = doorbell_->value();
    doorbell_->announce(Doorbell::caller);
    if (!turn() && !handle.settled()) {
      const std::chrono::nanoseconds left = deadline - now;
      const auto limit = nap();
      doorbell_->sleep(value, Doorbell::caller, limit ? std::min(*limit, left) : left);
    }
    doorbell_->announce(Doorbell::nobody);
  }
}

// Hands the rest of the work back to the engine's thread, which sleeps or waits for the seat.
void Engine::leave_seat() {
  doorbell_->announce(awaits_news() ? Doorbell::engine : Doorbell::indifferent);
  const bool wake = turn() || nap().has_value();
  if (wake) doorbell_->announce(Doorbell::nobody);
  seat_.leave();
  if (wake) doorbell_->wake_engine();
}

bool Engine::awaits_news() const {
  return std::any_of(process_sets_.begin(), process_sets_.end(),
                     [](const auto& entry) { return entry.second->awaits_news(); });
}

// How long a caller looks for news without a break before it sleeps.
std::chrono::nanoseconds Engine::spin() const {
  const std::chrono::nanoseconds spin = config_.options.spin;
  const bool polls =
      std::any_of(process_sets_.begin(), process_sets_.end(), [](const auto& entry) { return entry.second->polls(); });
  return polls && spin.count() > 0 ? std::max<std::chrono::nanoseconds>(spin, kPollingSpin) : spin;
}

// How long the driver may sleep when nobody rings; nothing means for ever.
std::optional<std::chrono::nanoseconds> Engine::nap() const {
  std::optional<std::chrono::nanoseconds> shortest;
  for (const auto& [id, set] : process_sets_) {
    const auto nap = set->nap();
    if (nap && (!shortest || *nap < *shortest)) shortest = nap;
  }
  return shortest;
}

// One look at everything that can have moved; true when something has.
bool Engine::turn() {
  bool progressed = take_submissions();
  for (auto& [id, set] : process_sets_) progressed |= set->turn();
  return progressed;
}

bool Engine::take_submissions() {
  if (!has_submissions_.load(std::memory_order_acquire)) return false;
  std::vector<std::shared_ptr<Operation>> submissions;
  {
    std::lock_guard lock(inbox_mutex_);
    submissions.swap(inbox_);
    has_submissions_.store(false, std::memory_order_relaxed);
  }
  for (auto& operation : submissions) {
    const auto found = process_sets_.find(operation->process_set);
    if (found != process_sets_.end()) {
      found->second->submit(std::move(operation));
    } else {
      const Error error{ErrorKind::internal,
                        "process set " + std::to_string(operation->process_set) + " has been removed"};
      settle(operation, &error);
    }
  }
  return true;
}

void Engine::settle(const std::shared_ptr<Operation>& operation, const Error* error) {
  operation->trace.settled(error != nullptr);
  {
    // Before the handle is settled, so that whoever waits for it may use the name again.
    std::lock_guard lock(inbox_mutex_);
    if (holds_name(*operation->request)) names_in_flight_[operation->process_set].erase(operation->request->name);
    under_way_ -= operation->handle->id() != 0;
    if (operation->reported && operation->done) {
      on_device_.emplace_back(operation->handle->id(), operation->done);
    } else if (operation->reported && !operation->handle->memory_abandoned()) {
      settled_.push_back(operation->handle->id());
    }
  }
  if (error != nullptr) {
    operation->handle->fail({error->kind, subject_of(*operation->request) + " failed on rank " +
                                              std::to_string(config_.rank) + ": " + error->message},
                            std::move(operation->done));
  } else {
    operation->handle->complete(std::move(operation->done));
  }
  if (operation->then && operation.get() != driven_) {
    completion_threads_->run([handle = operation->handle, then = std::move(operation->then)] { then(*handle); });
  }
  seat_.announce_change();
}

}  // namespace horovodish
