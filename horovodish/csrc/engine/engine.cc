#include "engine/engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "engine/warning.h"
#include "memory/thread_setup.h"
#include "memory/waiting_costs.h"
#include "planes/make_plane.h"

namespace horovodish {

namespace {

// Farewells that peers do not take within this time are dropped.
constexpr std::chrono::seconds kFarewellLimit{1};
// Between hosts a farewell comes behind all data that MPI has taken from this rank but not sent yet. MPI moves it only while it is
// called, and after stop() nobody calls it. A peer takes the farewell within milliseconds unless its process is stopped. Only neighbours in
// the negotiation tree are covered: data for other ranks may stay with MPI until its next call.
constexpr std::chrono::seconds kTransferLimit{3};
constexpr std::chrono::microseconds kFarewellNap{20};
// MPI moves data while it is asked. A caller that napped between two segments would hold up both ends of the connection:
// 64 MiB between two hosts then take 1.5 times as long.
constexpr std::chrono::milliseconds kPollingSpin{2};
// After as long as so many yields take, a caller without news lets other threads run between two looks. The one that it waits for may
// need this core: ranks in other containers cannot be counted. Earlier it would only be late for the news.
constexpr int kYieldsBefore = 16;
// A caller spins for as long as so many wake-ups take. To sleep and come back costs it about four of them: the waker's and its own
// system calls, and cold caches.
constexpr int kWakesBefore = 8;
// A caller that waits for a GPU looks after naps from the shorter time to the longer one.
constexpr std::chrono::microseconds kShortGpuNap{20}, kLongGpuNap{1000};
// How long the removal of a process set waits for what was launched in it.
constexpr std::chrono::seconds kRemovalLimit{10};
constexpr std::chrono::hours kForEver{24};
// How often a rank that waits looks whether all of its process sleeps, and after which time without news. This is shorter than the time
// after which ranks give up.
constexpr std::chrono::seconds kLookAtThreads{1};
// How long the end of the process waits for threads that are on their way back to Python, which takes microseconds.
constexpr std::chrono::seconds kReturnLimit{1};
constexpr std::chrono::microseconds kReturnNap{50};

const Error kRemoved{ErrorKind::internal, "its process set has been removed"};

// What belongs to a family is looked at by its process set, in the order in which this rank hears of failures.
bool holds_name(const Request& request) { return request.refusal.empty() && request.family.name.empty(); }
bool has_caller(const Operation& operation) { return operation.handle->id() != 0; }

std::atomic<uint64_t> forks{0};

// How many forks lie between this process and the one that loaded the engine. getpid() would be a system call, several for
// each operation.
uint64_t forks_so_far() {
  static const bool counted = pthread_atfork(nullptr, nullptr, [] { ++forks; }) == 0;
  if (!counted) throw std::bad_alloc();
  return forks;
}

}  // namespace

// The seat of a caller who has taken it. Every way out of the scope gives the seat back.
class Engine::Driver {
 public:
  // `driven`: an operation whose `then` the caller calls itself if it is settled meanwhile.
  explicit Driver(Engine& engine, const Operation* driven = nullptr) : engine_(engine) { engine_.driven_ = driven; }
  ~Driver() {
    engine_.driven_ = nullptr;
    engine_.leave_seat();
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

 private:
  Engine& engine_;
};

Engine::Engine(EngineConfig config) : config_(std::move(config)), forks_(forks_so_far()) {
  const size_t local_ranks = config_.arena_memory.size();
  if (local_ranks > 0) {
    arena_ = std::make_shared<Arena>(std::exchange(config_.arena_memory, {}), config_.local_rank,
                                     EngineConfig::arena_layout(local_ranks, config_.options.chunk_bytes));
    doorbell_ = {arena_, &arena_->header(config_.local_rank).doorbell};
    peer_watch_ = std::make_unique<PeerWatch>(config_.peer_sockets, [bell = doorbell_.get()] { bell->ring_own(); });
  }
  if (config_.size > 1) {
    waiting_costs();
    start_thread();
  }
}

Engine::~Engine() { stop(false, text_of(config_.rank) + " left"); }

void Engine::add_process_set(int id, ProcessSetConfig config) {
  if (config.mpi) config.mpi->resolve();
  config.id = id;
  Place place{config.own, static_cast<int>(config.ranks.size())};
  for (const WorldRank rank : config.ranks) {
    place.ranks += (place.ranks.empty() ? "" : ",") + std::to_string(number_of(rank));
  }
  const auto plane = [this](const ProcessSetConfig& of, const auto& on_complete, const auto& on_refuse) {
    return make_plane(of, config_.options, arena_.get(), launch_order_, launched_operations_, on_complete, on_refuse);
  };
  std::shared_ptr<Doorbell> doorbell;
  {
    const SeatHold hold(seat_);
    doorbell = doorbell_;
    if (process_sets_.contains(id)) {
      throw std::invalid_argument("process set " + std::to_string(id) + " exists already");
    }
    process_sets_[id] = std::make_unique<ProcessSet>(std::move(config), config_.options, arena_.get(),
                                                     peer_watch_.get(), plane, static_cast<ProcessSet::Owner&>(*this));
  }
  {
    std::lock_guard lock(inbox_mutex_);
    uses_[id].place = std::move(place);
  }
  doorbell->wake_engine();  // a set that lives on several hosts limits its sleep
}

bool Engine::process_set_busy(int id) {
  std::lock_guard lock(inbox_mutex_);
  const auto use = uses_.find(id);
  return use != uses_.end() && use->second.under_way > 0;
}

void Engine::remove_process_set(int id) {
  {
    const SeatHold hold(seat_);
    take_submissions();
    process_set(id);
    std::lock_guard lock(inbox_mutex_);
    if (uses_[id].under_way > 0) {
      throw std::invalid_argument("process set " + std::to_string(id) + " has operations under way on " +
                                  text_of(config_.rank) + ". Remedy: synchronize them before it is removed.");
    }
    uses_.erase(id);  // what another thread submits from now on finds no set
  }
  wait_for_gpu(launched(), Clock::now() + kRemovalLimit);
  const SeatHold hold(seat_);
  process_sets_.erase(id);
}

Place Engine::place(int process_set) {
  std::lock_guard lock(inbox_mutex_);
  const auto use = uses_.find(process_set);
  return use == uses_.end() ? Place{} : use->second.place;
}

void Engine::clear_region(size_t region) {
  if (arena_) arena_->clear(region);
}

// The threads and the memory of the engine stay behind in a fork.
bool Engine::is_left_behind() const { return forks != forks_; }

void Engine::check_process() const {
  if (!is_left_behind()) return;
  throw ForkedProcess("process " + std::to_string(getpid()) + " was forked from " + text_of(config_.rank) +
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

void Engine::enqueue(std::shared_ptr<Operation> operation, bool waits) {
  check_process();
  const Request& request = *operation->request;
  if (!waits) waiting_threads_.remember_submitter();
  std::shared_ptr<Doorbell> doorbell;
  {
    std::lock_guard lock(inbox_mutex_);
    if (closed_) {
      refused_ = true;
      throw EngineStopped(subject_of(request) + ": the engine has been shut down");
    }
    // What the system may refuse comes first: an operation that is not enqueued has no name and is not counted.
    if (operation->then) completion_threads_->prepare();
    if (inbox_.size() == inbox_.capacity()) inbox_.reserve(2 * inbox_.size() + 1);
    // What NCCL has begun goes on also when nobody waits for it.
    if (!request.on_host() && !thread_.joinable()) start_thread();
    Use& use = uses_[operation->process_set];
    if (holds_name(request) && !use.names.insert(request.name).second) {
      throw DuplicateName(subject_of(request) + " on " + text_of(config_.rank) + ": " + kNameInUse);
    }
    use.under_way += has_caller(*operation);
    // A caller that is about to wait drives the engine, which takes the time anyway when it takes the operation up.
    if (timeline_) operation->trace = {timeline_, waits ? 0 : Timeline::now()};
    operation->handle->process_set = operation->process_set;
    inbox_.push_back(std::move(operation));
    has_submissions_.store(true, std::memory_order_release);
    doorbell = doorbell_;
  }
  if (config_.size == 1) {  // nobody to wait for
    const SeatHold hold(seat_);
    while (turn()) {
    }
    if (awaits_news()) doorbell->wake_engine();
  } else if (waits) {
    doorbell->ring_caller();
  } else {
    doorbell->ring_own();
  }
}

void Engine::enqueue_and_drive(const std::shared_ptr<Operation>& operation, std::chrono::nanoseconds limit) {
  hold_at_exit();
  const bool drives = config_.size > 1 && nothing_submitted() && seat_.take_if_free();
  if (!drives) return enqueue(operation, false);
  std::function<void(const Handle&)> then;
  {
    const Driver driver(*this, operation.get());
    enqueue(operation, true);
    drive_until(*operation->handle, Clock::now() + limit);
    if (operation->handle->settled()) then = std::move(operation->then);
  }
  hold_at_exit();
  if (then) then(*operation->handle);
}

bool Engine::nothing_submitted() {
  std::lock_guard lock(inbox_mutex_);
  return std::all_of(uses_.begin(), uses_.end(), [](const auto& entry) { return entry.second.under_way == 0; });
}

void Engine::refuse(Kind kind, const std::string& name, int process_set, const std::string& why, Family family) {
  if (kind == Kind::join) return;  // it is the ranks that are waited for, not an operation of its name
  enqueue(refusal_of(kind, name, process_set, why, std::move(family)), false);
}

bool Engine::wait(const Handle& handle, std::chrono::nanoseconds limit) {
  const bool settled = handle.settled();
  if (settled && is_left_behind()) return true;
  check_process();
  waiting_threads_.remember_caller();
  if (settled) return true;
  const WaitingThreads::Scope waits(waiting_threads_, handle.process_set);
  return drive(handle, limit);
}

bool Engine::drive(const Handle& handle, std::chrono::nanoseconds limit) {
  if (handle.settled()) return true;
  check_process();
  const Clock::time_point deadline = Clock::now() + limit;
  if (seat_.take_as_caller(deadline, [&] { return handle.settled(); })) {
    const Driver driver(*this);
    drive_until(handle, deadline);
  }
  return handle.settled();
}

bool Engine::settle_launched(uint64_t number, std::chrono::nanoseconds limit) {
  check_process();
  if (!launched_operations_.any_lost()) wait_for_gpu(number, Clock::now() + limit);
  if (!launched_operations_.any_lost()) return launched_operations_.ended(number);
  loss_raised_ = true;
  throw LaunchedOperationLost(*launched_operations_.loss());
}

// A GPU rings no doorbell, so the caller looks after each nap. Others may drive meanwhile.
void Engine::wait_for_gpu(uint64_t number, Clock::time_point deadline) noexcept {
  const auto over = [&] { return launched_operations_.ended(number); };
  auto nap = kShortGpuNap;
  while (!over() && Clock::now() < deadline) {
    if (seat_.take_as_caller(Clock::now() + nap, over)) {
      const Driver driver(*this);
      turn();
    }
    if (!over()) std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kLongGpuNap);
  }
}

std::map<WorldRank, Lateness> Engine::lateness(int process_set) {
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

std::string Engine::loss() {
  std::lock_guard lock(inbox_mutex_);
  if (!loss_.empty() || !launched_operations_.any_lost()) return loss_;
  return launched_operations_.loss()->message;
}

std::string Engine::last_failure() {
  std::lock_guard lock(inbox_mutex_);
  return last_failure_;
}

void Engine::stop(bool failed, const std::string& reason) noexcept {
  {
    std::lock_guard lock(inbox_mutex_);
    if (closed_) return;
    closed_ = true;
  }
  std::shared_ptr<Doorbell> doorbell;  // also keeps the arena while threads of this engine may use it
  {
    const SeatHold hold(seat_);
    take_submissions();
    for (auto& [id, set] : process_sets_) set->leave(failed, reason);
    const bool holds_data = std::any_of(process_sets_.begin(), process_sets_.end(),
                                        [](const auto& entry) { return entry.second->may_hold_data(); });
    const Clock::time_point limit = Clock::now() + (holds_data && !failed ? kTransferLimit : kFarewellLimit);
    while (!farewells_sent() && Clock::now() < limit) std::this_thread::sleep_for(kFarewellNap);
    stopping_ = true;
    process_sets_.clear();
    std::lock_guard lock(inbox_mutex_);
    doorbell = std::exchange(doorbell_, {std::shared_ptr<void>(), &own_doorbell_});
  }
  doorbell->wake_engine();
  if (thread_.joinable()) thread_.join();
  if (!failed) say_what_was_lost();
  peer_watch_.reset();
  if (const auto timeline = take_timeline()) timeline->finish();
  completion_threads_.reset();
  arena_.reset();  // handles and plans that Python still holds keep the engine, but not the memory
}

// For stop(), after which no call can raise it.
void Engine::say_what_was_lost() const noexcept {
  if (loss_raised_ || !launched_operations_.any_lost()) return;
  try {
    warn(launched_operations_.loss()->message);
  } catch (const std::bad_alloc&) {
  }
}

// A set whose peer is slow must not hold up the farewells of the others, whose peers would take this rank for dead.
bool Engine::farewells_sent() {
  bool all = true;
  for (auto& [id, set] : process_sets_) all &= set->advance_farewell();
  return all;
}

void Engine::start_thread() {
  thread_ = std::thread([this] { run(); });
}

void Engine::run() {
  set_up_thread("horovodish");
  const BackgroundThread background;
  while (!stopping_) {
    seat_.take_as_engine();
    const auto doorbell = doorbell_;
    doorbell->announce(Doorbell::nobody);
    while (!stopping_ && !seat_.callers_waiting() && turn()) {
    }
    const uint32_t value = doorbell->value();
    doorbell->announce(awaits_news() ? Doorbell::engine : Doorbell::indifferent);
    // Threads that wait here say it themselves, and this thread may drive while one looks at Python's signals.
    if (Clock::now() - caller_spoke_ > kLookAtThreads) say_who_waits();
    const bool again = stopping_ || seat_.callers_waiting() || turn();
    const auto limit = nap();
    sleeps_until_ = Clock::now() + limit.value_or(kForEver);
    seat_.leave();
    if (!again) doorbell->sleep(value, Doorbell::engine, limit);
  }
}

void Engine::drive_until(const Handle& handle, Clock::time_point deadline) noexcept {
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
      if (now - idle_since < kYieldsBefore * waiting_costs().yield) {
        pause_processor();
      } else {
        std::this_thread::yield();
      }
      continue;
    }
    say_who_waits();
    caller_spoke_ = now;
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

// A thread counts as waiting until it has run again, so a rank may say too early that it waits. It takes that back here, the next time
// that its driver has nothing to do: within WAIT_SLICE_SECONDS, which is shorter than the time after which ranks give up.
void Engine::say_who_waits() noexcept {
  const bool others_submit = waiting_threads_.any_only_submits();
  look_at_threads();
  for (auto& [id, set] : process_sets_) {
    const bool all_wait = waiting_threads_.all_wait_in(id) && !computes_ && (!others_submit || set->is_quiet());
    set->flush(all_wait || id == sleeping_in_);
  }
}

// A decision of any process set may wake a thread that then submits in another one.
void Engine::look_at_threads() noexcept {
  const Clock::time_point now = Clock::now();
  if (now < looks_again_) return;
  looks_again_ = now + kLookAtThreads;
  sleeping_in_.reset();
  const auto busy = [](const auto& entry) { return entry.second->busy(); };
  const auto is_stuck = [](const auto& entry) {
    return entry.second->busy() && entry.second->quiet_for() >= kLookAtThreads;
  };
  if (std::any_of(process_sets_.begin(), process_sets_.end(), is_stuck)) {
    try {
      computes_ = computing_threads_.look(waiting_threads_.waiting());
    } catch (const std::bad_alloc&) {  // it looks again
    }
  } else {
    computes_ = false;
    computing_threads_.forget();
  }
  if (std::count_if(process_sets_.begin(), process_sets_.end(), busy) != 1) return;
  const auto& [id, set] = *std::find_if(process_sets_.begin(), process_sets_.end(), busy);
  if (set->quiet_for() < kLookAtThreads) return;
  try {
    if (process_sleeps(waiting_threads_.waiting_in(id))) sleeping_in_ = id;
  } catch (const std::bad_alloc&) {  // it looks again
  }
}

// Hands the rest of the work back to the engine's thread, which sleeps or waits for the seat. It is woken where it would sleep for too
// long.
void Engine::leave_seat() noexcept {
  doorbell_->announce(awaits_news() ? Doorbell::engine : Doorbell::indifferent);
  const bool moved = turn();
  const auto limit = nap();
  const bool wake = moved || (limit && Clock::now() + *limit < sleeps_until_);
  if (wake) doorbell_->announce(Doorbell::nobody);
  const auto doorbell = wake ? doorbell_ : nullptr;
  seat_.leave();
  if (doorbell) doorbell->wake_engine();
}

bool Engine::awaits_news() const {
  return std::any_of(process_sets_.begin(), process_sets_.end(),
                     [](const auto& entry) { return entry.second->awaits_news(); });
}

// How long a caller looks for news without a break before it sleeps.
std::chrono::nanoseconds Engine::spin() const {
  const std::chrono::nanoseconds spin =
      config_.options.spin ? *config_.options.spin : kWakesBefore * waiting_costs().wake;
  const bool polls =
      std::any_of(process_sets_.begin(), process_sets_.end(), [](const auto& entry) { return entry.second->polls(); });
  return polls && spin.count() > 0 ? std::max<std::chrono::nanoseconds>(spin, kPollingSpin) : spin;
}

// How long the driver may sleep when nobody rings; nothing means for ever.
std::optional<std::chrono::nanoseconds> Engine::nap() const {
  std::optional<std::chrono::nanoseconds> shortest;
  const auto limit = [&shortest](std::chrono::nanoseconds nap) { shortest = std::min(shortest.value_or(nap), nap); };
  for (const auto& [id, set] : process_sets_) {
    if (const auto nap = set->nap()) limit(*nap);
    if (set->busy()) limit(kLookAtThreads);
  }
  return shortest;
}

// One look at everything that can have moved; true when something has.
bool Engine::turn() noexcept {
  bool progressed = take_submissions();
  for (auto& [id, set] : process_sets_) progressed |= set->turn();
  return progressed;
}

bool Engine::take_submissions() noexcept {
  if (!has_submissions_.load(std::memory_order_acquire)) return false;
  std::vector<std::shared_ptr<Operation>> submissions;
  {
    std::lock_guard lock(inbox_mutex_);
    submissions.swap(inbox_);
    has_submissions_.store(false, std::memory_order_relaxed);
  }
  for (const auto& operation : submissions) {
    const auto found = process_sets_.find(operation->process_set);
    if (found != process_sets_.end()) {
      found->second->submit(operation);
    } else {
      settle(operation, &kRemoved);
    }
  }
  return true;
}

// A rank that has joined does not know what others have reduced since, until its join() returns.
void Engine::count(const Operation& operation) noexcept {
  const Request& request = *operation.request;
  if (has_caller(operation) && (request.kind == Kind::allreduce || request.kind == Kind::reducescatter)) {
    size_t bytes = 0;
    for (const Member& member : request.members) bytes += row_bytes(member);
    reduced_bytes_ += bytes;
  }
  if (operation.process_set != 0) return;
  if (!has_caller(operation)) {
    ++completed_while_joined_;
  } else {
    completed_ += request.kind == Kind::join ? 1 + completed_while_joined_.exchange(0) : 1;
  }
}

void Engine::settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept {
  sleeping_in_.reset();  // whoever waits for it wakes
  operation->trace.settled(error != nullptr);
  Error failure = error != nullptr ? described(*operation, *error) : Error{};
  {
    // Before the handle is settled, so that whoever waits for it may use the name again.
    std::lock_guard lock(inbox_mutex_);
    if (const auto use = uses_.find(operation->process_set); use != uses_.end()) {
      if (holds_name(*operation->request)) use->second.names.erase(operation->request->name);
      use->second.under_way -= has_caller(*operation);
    }
    try {
      if (operation->reported && operation->done) {
        on_device_.emplace_back(operation->handle->id(), operation->done);
      } else if (operation->reported && !operation->handle->memory_abandoned()) {
        settled_.push_back(operation->handle->id());
      }
      if (error != nullptr && error->kind == ErrorKind::rank_lost) loss_ = error->message;
      if (error != nullptr) last_failure_ = failure.message;
    } catch (const std::bad_alloc&) {  // then its memory is kept for ever, or the loss has no text
    }
  }
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
    const std::string in_step = step == 0 ? "" : " in step " + std::to_string(step);
    return {error.kind, subject_of(*operation.request) + " failed on " + text_of(config_.rank) + in_step + ": " +
                            error.message + std::string(error.remedy)};
  } catch (const std::bad_alloc&) {
    return {error.kind, kOutOfMemory};
  }
}

}  // namespace horovodish
