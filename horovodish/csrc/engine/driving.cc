// Which thread drives the engine, and how it waits meanwhile.
#include <algorithm>
#include <new>

#include "engine/engine.h"
#include "memory/sleeping_process.h"
#include "memory/waiting_costs.h"

namespace horovodish {

namespace {

// The engine's thread looks this often if nobody rings. A caller that leaves an operation to it for later then need not
// wake it.
constexpr std::chrono::seconds kLongestSleep{1};
// MPI moves data only while it is called. A caller that slept between two segments would delay both ends of the
// connection: 64 MiB between two hosts would then take 1.5 times as long.
constexpr std::chrono::milliseconds kPollingSpin{2};
// Once a caller has spun without news for the time of this many yields, it lets other threads run between two looks.
// The rank that it waits for may need this core: ranks in other containers cannot be counted. An earlier yield would
// only delay the news.
constexpr int kYieldsBefore = 16;
// A caller spins for the time of this many wake-ups. Sleeping and waking up costs it about four of them: system calls
// of the waker and of the caller, and cold caches.
constexpr int kWakesBefore = 8;
// While a caller waits for a GPU, its naps grow from the shorter time to the longer one.
constexpr std::chrono::microseconds kShortGpuNap{20}, kLongGpuNap{1000};
// On a busy machine, a thread may take this long to continue after the operation that it waits for has ended.
constexpr std::chrono::seconds kResumeTime{1};

// True if this thread serves a library and not the script: its waits are not recorded.
thread_local bool serves_library = false;

const Error kRemoved{ErrorKind::internal, "its process set has been removed"};

}  // namespace

// Holds the seat for a caller who has taken it. Every way out of the scope gives the seat back.
class Engine::Driver {
 public:
  // `driven`: if this operation settles meanwhile, the caller itself calls its `then`.
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

void record_no_waits() noexcept { serves_library = true; }

void Engine::waited(int64_t begin) {
  std::shared_ptr<Timeline> timeline;
  {
    std::lock_guard lock(inbox_mutex_);
    timeline = timeline_;
  }
  if (timeline) timeline->waited(begin);
}

void Engine::enqueue_and_drive(const std::shared_ptr<Operation>& operation, std::chrono::nanoseconds limit) {
  stop_here_if_exiting();
  const bool drives = config_.size > 1 && nothing_submitted() && seat_.take_if_free();
  if (!drives) return enqueue(operation, false);
  Then then;
  {
    const Driver driver(*this, operation.get());
    enqueue(operation, true);
    drive_until(*operation->handle, Clock::now() + limit);
    if (operation->handle->settled()) then = std::move(operation->then);
  }
  stop_here_if_exiting();
  if (then) then(operation->handle);
}

bool Engine::nothing_submitted() {
  std::lock_guard lock(inbox_mutex_);
  return std::ranges::all_of(uses_, [](const auto& entry) { return entry.second.under_way == 0; });
}

bool Engine::wait(const Handle& handle, std::chrono::nanoseconds limit) {
  const bool settled = handle.settled();
  if (settled && is_forked()) return true;
  check_process();
  if (settled) return true;
  const WaitingThreads::Scope waits(waiting_threads_, handle);
  if (!records_waits_.load(std::memory_order_relaxed) || serves_library) return drive(handle, limit);
  const int64_t begin = Timeline::now();
  const bool is_settled = drive(handle, limit);
  waited(begin);
  return is_settled;
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
  throw EngineError(launched_operations_.loss()->kind, launched_operations_.loss()->message);
}

// A GPU rings no doorbell, so the caller looks after each nap. Other threads may drive meanwhile.
void Engine::wait_for_gpu(uint64_t number, Clock::time_point deadline) noexcept {
  const auto over = [&] { return launched_operations_.ended(number); };
  auto nap = kShortGpuNap;
  while (!over() && Clock::now() < deadline) {
    if (seat_.take_as_caller(Clock::now() + nap, over)) {
      const Driver driver(*this);
      turn();
    }
    if (!over()) Clock::sleep(nap);
    nap = std::min(2 * nap, kLongGpuNap);
  }
}

void Engine::start_thread() {
  thread_ = std::thread([this] { run(); });
}

void Engine::run() {
  const BackgroundThread background("horovodish");
  while (!stopping_) {
    seat_.take_as_engine();
    const auto doorbell = doorbell_;
    doorbell->announce(Doorbell::nobody);
    while (!stopping_ && !seat_.callers_waiting() && turn()) {
    }
    const uint32_t value = doorbell->value();
    doorbell->announce(awaits_news() ? Doorbell::engine : Doorbell::indifferent);
    const bool again = stopping_ || seat_.callers_waiting() || turn();
    const std::chrono::nanoseconds limit =
        std::min<std::chrono::nanoseconds>(nap().value_or(kLongestSleep), kLongestSleep);
    sleeps_until_ = Clock::now() + limit;
    seat_.unlock();
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

// Any thread that runs, or will wake up by itself, may submit, even if it has not used a collective yet. A thread may
// wait for several operations in turn, or be about to continue at the time of this look, so two looks must give the
// same result. A decision of any process set may wake a thread that then submits to another set, so nothing else may be
// under way.
bool Engine::submits_nothing(int process_set) noexcept {
  try {
    Look& last = looks_[process_set];
    const Clock::time_point now = Clock::now();
    if (now - last.time < kResumeTime) return false;
    const bool others_busy = std::ranges::any_of(
        process_sets_, [&](const auto& entry) { return entry.first != process_set && entry.second->busy(); });
    const bool sleeps = !others_busy && process_sleeps(waiting_threads_.in(process_set));
    // Asked last: a thread's submissions before its wait are in the inbox by then, or have been stated.
    const bool waits_for_good = sleeps && !has_submissions_.load(std::memory_order_acquire);
    const bool same = last.sleeps && last.news == news_;
    last.time = now;
    last.news = news_;
    last.sleeps = waits_for_good;
    return waits_for_good && same;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

// Hands the remaining work back to the engine's thread, which sleeps or waits for the seat. Wakes that thread if it
// would sleep too long.
void Engine::leave_seat() noexcept {
  doorbell_->announce(awaits_news() ? Doorbell::engine : Doorbell::indifferent);
  const bool moved = turn();
  const auto limit = nap();
  const bool wake = moved || (limit && Clock::now() + *limit < sleeps_until_);
  if (wake) doorbell_->announce(Doorbell::nobody);
  const auto doorbell = wake ? doorbell_ : nullptr;
  seat_.unlock();
  if (doorbell) doorbell->wake_engine();
}

bool Engine::awaits_news() const {
  return std::ranges::any_of(process_sets_, [](const auto& entry) { return entry.second->awaits_news(); });
}

// How long a caller looks for news without a break before it sleeps.
std::chrono::nanoseconds Engine::spin() const {
  const std::chrono::nanoseconds spin =
      config_.options.spin ? *config_.options.spin : kWakesBefore * waiting_costs().wake;
  const bool polls = std::ranges::any_of(process_sets_, [](const auto& entry) { return entry.second->polls(); });
  return polls && spin.count() > 0 ? std::max<std::chrono::nanoseconds>(spin, kPollingSpin) : spin;
}

// How long the driver may sleep if nobody rings; none: for ever.
std::optional<std::chrono::nanoseconds> Engine::nap() const {
  std::optional<std::chrono::nanoseconds> shortest;
  for (const auto& [id, set] : process_sets_) {
    if (const auto nap = set->nap()) shortest = std::min(shortest.value_or(*nap), *nap);
  }
  return shortest;
}

// Looks once at everything that can have moved. Returns true if anything has.
bool Engine::turn() noexcept {
  bool progressed = take_submissions();
  for (auto& [id, set] : process_sets_) progressed |= set->turn();
  if (status_wanted_.load(std::memory_order_relaxed)) write_status();
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
  news_ += submissions.size();
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

}  // namespace horovodish
