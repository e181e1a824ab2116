#include "engine.h"

#include <algorithm>
#include <cstdio>

#include "links/mpi_link.h"
#include "links/shared_memory_link.h"
#include "planes/mpi_ring.h"
#include "planes/shared_memory.h"
#include "planes/solo.h"
#include "thread_setup.h"

namespace horovodish {

namespace {

// Children per node of the tree of hosts.
constexpr size_t kArity = 8;
// Every rank waits and nothing is decided: after this time it is taken for a mistake and reported.
constexpr std::chrono::seconds kStuckAfter{2};
// Farewells that peers do not take within this time are dropped.
constexpr std::chrono::seconds kFarewellLimit{1};
// MPI rings no doorbell. While something is under way the engine looks again after a nap that grows from the first to the
// second value.
constexpr std::chrono::microseconds kShortestNap{20}, kLongestNap{1000};

std::string subject(const Operation& operation) {
  return std::string(name_of(operation.request->kind)) + " '" + operation.request->name + "'";
}

}  // namespace

Engine::Engine(EngineConfig config) : config_(std::move(config)) {
  connect();
  if (config_.size > 1) thread_ = std::thread([this] { run(); });
}

Engine::~Engine() { stop(false, "rank " + std::to_string(config_.rank) + " has left"); }

void Engine::connect() {
  const auto& hosts = config_.hosts;
  const auto on_complete = [this](const std::shared_ptr<Operation>& operation) { settle(operation, std::nullopt); };
  size_t host = 0;
  while (std::find(hosts[host].begin(), hosts[host].end(), config_.rank) == hosts[host].end()) ++host;
  const std::vector<int>& local = hosts[host];
  const auto own = static_cast<size_t>(std::find(local.begin(), local.end(), config_.rank) - local.begin());

  if (local.size() > 1) {
    arena_ = std::make_unique<Arena>(config_.arena_descriptors, own,
                                     EngineConfig::arena_layout(local.size(), config_.chunk_bytes));
    doorbell_ = &arena_->header(own).doorbell;
    peer_watch_ = std::make_unique<PeerWatch>(config_.peer_sockets, [this] { doorbell_->ring_own(); });
  }
  if (config_.mpi) config_.mpi->resolve();

  std::vector<RankSet> participants{RankSet(config_.rank)};
  if (own == 0) {
    for (size_t i = 1; i < local.size(); ++i) {
      participants.emplace_back(local[i]);
      children_.push_back({local[i], std::make_unique<SharedMemoryLink>(*arena_, i), i});
    }
    for (size_t child = host * kArity + 1; child <= (host + 1) * kArity && child < hosts.size(); ++child) {
      participants.push_back(subtree(child));
      children_.push_back({hosts[child][0], make_mpi_link(hosts[child][0]), std::nullopt});
    }
    if (host > 0) {
      const int parent = hosts[(host - 1) / kArity][0];
      parent_ = Edge{parent, make_mpi_link(parent), std::nullopt};
    }
  } else {
    parent_ = Edge{local[0], std::make_unique<SharedMemoryLink>(*arena_, 0), 0};
  }
  negotiation_ = std::make_unique<Negotiation>(config_.size, !parent_, std::move(participants), config_.cache_capacity);

  if (config_.size == 1) {
    plane_ = std::make_unique<SoloPlane>(on_complete);
  } else if (hosts.size() == 1) {
    plane_ = std::make_unique<SharedMemoryPlane>(*arena_, on_complete);
  } else {
    plane_ = std::make_unique<MpiRingPlane>(*config_.mpi, config_.rank, config_.size, config_.generation,
                                            config_.ring_segment_bytes, on_complete);
  }
}

// The ranks of host `host` and of the hosts below it in the tree.
RankSet Engine::subtree(size_t host) const {
  RankSet ranks;
  for (const int rank : config_.hosts[host]) ranks.add(RankSet(rank));
  for (size_t child = host * kArity + 1; child <= (host + 1) * kArity && child < config_.hosts.size(); ++child) {
    ranks.add(subtree(child));
  }
  return ranks;
}

std::unique_ptr<Link> Engine::make_mpi_link(int peer) const {
  return std::make_unique<MpiLink>(*config_.mpi, peer, config_.generation);
}

// The threads and the memory of the engine stay behind in a fork.
void Engine::check_process() const {
  if (getpid() == process_) return;
  throw ForkedProcess("process " + std::to_string(getpid()) + " was forked from rank " + std::to_string(config_.rank) +
                      " and cannot use its engine. Remedy: use horovodish in the process that called init() only.");
}

void Engine::enqueue(std::shared_ptr<Operation> operation, bool waits) {
  check_process();
  const std::string& name = operation->request->name;
  {
    std::lock_guard lock(inbox_mutex_);
    if (closed_) throw EngineStopped(subject(*operation) + ": the engine has been shut down");
    if (!names_in_flight_.insert(name).second) {
      throw DuplicateName(subject(*operation) + " on rank " + std::to_string(config_.rank) +
                          ": an operation of that name has not completed yet. Remedy: synchronize it first, or give the "
                          "two operations different names.");
    }
    inbox_.push_back(std::move(operation));
    has_submissions_.store(true, std::memory_order_release);
  }
  if (config_.size == 1) {  // nobody to wait for
    seat_.take_as_caller(Clock::time_point::max(), [] { return false; });
    while (turn()) {
    }
    seat_.leave();
  } else if (!waits) {
    doorbell_->ring_own();
  }
}

bool Engine::wait(const Handle& handle, std::chrono::nanoseconds limit) {
  const Clock::time_point deadline = Clock::now() + limit;
  if (handle.settled()) return true;
  check_process();
  if (seat_.take_as_caller(deadline, [&] { return handle.settled(); })) {
    drive_until(handle, deadline);
    leave_seat();
  }
  return handle.settled();
}

std::vector<uint64_t> Engine::take_settled() {
  std::lock_guard lock(inbox_mutex_);
  return std::exchange(settled_, {});
}

void Engine::stop(bool failed, const std::string& reason) {
  {
    std::lock_guard lock(inbox_mutex_);
    if (closed_) return;
    closed_ = true;
  }
  seat_.take_as_caller(Clock::time_point::max(), [] { return false; });
  take_submissions();
  // Peers may already be executing what this rank gives up.
  failed |= busy();
  abandon({ErrorKind::engine_stopped, "shutdown() was called on rank " + std::to_string(config_.rank) +
                                          " while the operation was pending"});
  plane_.reset();
  const Clock::time_point limit = Clock::now() + kFarewellLimit;
  const auto say_farewell = [&](Edge& edge) {
    if (!edge.lost) edge.link->send_farewell(failed, reason);
  };
  const auto sent = [&](Edge& edge) {
    edge.link->advance();
    return edge.lost || edge.link->all_sent();
  };
  if (parent_) say_farewell(*parent_);
  std::for_each(children_.begin(), children_.end(), say_farewell);
  while (Clock::now() < limit && !((!parent_ || sent(*parent_)) && std::all_of(children_.begin(), children_.end(), sent))) {
    std::this_thread::sleep_for(kShortestNap);
  }
  stopping_ = true;
  seat_.leave();
  doorbell_->wake_engine();
  if (thread_.joinable()) thread_.join();
  peer_watch_.reset();
}

void Engine::run() {
  set_up_thread("horovodish");
  while (!stopping_) {
    seat_.take_as_engine();
    doorbell_->announce(Doorbell::nobody);
    while (!stopping_ && !seat_.callers_waiting() && turn()) {
    }
    const uint32_t value = doorbell_->value();
    doorbell_->announce(busy() ? Doorbell::engine : Doorbell::indifferent);
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
    if (now - idle_since < config_.spin) {
      pause_processor();
      continue;
    }
    if (!undecided_.empty()) negotiation_->flush();
    const uint32_t value = doorbell_->value();
    doorbell_->announce(Doorbell::caller);
    if (!turn() && !handle.settled()) {
      const auto limit = nap();
      doorbell_->sleep(value, Doorbell::caller, limit ? std::min<std::chrono::nanoseconds>(*limit, deadline - now) : deadline - now);
    }
    doorbell_->announce(Doorbell::nobody);
  }
}

// Hands the rest of the work back to the engine's thread, which sleeps or waits for the seat.
void Engine::leave_seat() {
  doorbell_->announce(busy() ? Doorbell::engine : Doorbell::indifferent);
  const bool wake = turn() || nap().has_value();
  if (wake) doorbell_->announce(Doorbell::nobody);
  seat_.leave();
  if (wake) doorbell_->wake_engine();
}

// How long the engine may sleep when nobody rings; nothing means for ever.
std::optional<std::chrono::nanoseconds> Engine::nap() {
  if (busy() && plane_ && plane_->needs_polling()) {
    const auto grown = kShortestNap * (1 + fruitless_turns_ / 8);
    return std::min(grown, kLongestNap);
  }
  if (!stuck_text_.empty()) return kStuckAfter;
  return std::nullopt;
}

// One look at everything that can have moved; true when something has.
bool Engine::turn() {
  bool progressed = take_submissions();
  if (parent_) progressed |= read(*parent_, std::nullopt);
  for (size_t i = 0; i < children_.size(); ++i) progressed |= read(children_[i], i + 1);
  send_messages();
  apply_decisions();
  if (plane_) {
    try {
      progressed |= plane_->advance() == Progress::progressed;
    } catch (const std::exception& error) {
      negotiation_->lost(true, "rank " + std::to_string(config_.rank) + ": " + error.what());
      negotiation_->parent_lost(true, "rank " + std::to_string(config_.rank) + ": " + error.what());
      send_messages();
      apply_decisions();
    }
  }
  if (!stuck_text_.empty()) report_stuck();
  fruitless_turns_ = progressed ? 0 : fruitless_turns_ + 1;
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
    const Request& request = *operation->request;
    negotiation_->submit(request.name, *operation->signature, operation->absent);
    undecided_.emplace(request.name, std::move(operation));
  }
  return true;
}

// Reads what a neighbour has to say, last of all that it has gone. `child`: participant, none for the parent.
bool Engine::read(Edge& edge, std::optional<size_t> child) {
  if (edge.lost) return false;
  // Asked before reading: whatever the peer wrote in its life is there by now.
  const bool dead = edge.local && peer_watch_->gone(*edge.local);
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

void Engine::send_messages() {
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

void Engine::apply_decisions() {
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
        settle(found.mapped(), Error{lost ? ErrorKind::rank_lost : ErrorKind::mismatch, decision.text});
        break;
      }
      case Decision::Type::lost:
      case Decision::Type::abort: {
        const Error error{ErrorKind::rank_lost, decision.text};
        auto undecided = std::exchange(undecided_, {});
        for (const auto& [name, operation] : undecided) settle(operation, error);
        if (decision.type == Decision::Type::abort) {
          abandon(error);
          plane_.reset();
        }
        break;
      }
      case Decision::Type::stuck:
        stuck_text_ = decision.text;
        stuck_since_ = Clock::now();
        break;
      case Decision::Type::join_done:
        break;
    }
  }
}

void Engine::execute(const Decision& decision) {
  auto found = undecided_.extract(decision.name);
  const std::shared_ptr<Operation> operation = std::move(found.mapped());
  operation->absent = decision.absent;
  operation->contributors = decision.contributors;
  executing_.emplace(operation->handle->id(), operation);
  plane_->start(operation);
}

// Ends everything that this rank has under way.
void Engine::abandon(const Error& error) {
  auto undecided = std::exchange(undecided_, {});
  auto executing = std::exchange(executing_, {});
  for (const auto& [name, operation] : undecided) settle(operation, error);
  for (const auto& [id, operation] : executing) settle(operation, error);
}

void Engine::settle(const std::shared_ptr<Operation>& operation, std::optional<Error> error) {
  executing_.erase(operation->handle->id());
  {
    // Before the handle is settled, so that whoever waits for it may use the name again.
    std::lock_guard lock(inbox_mutex_);
    names_in_flight_.erase(operation->request->name);
    if (operation->reported) settled_.push_back(operation->handle->id());
  }
  if (error) {
    error->message = subject(*operation) + " failed on rank " + std::to_string(config_.rank) + ": " + error->message;
    operation->handle->fail(std::move(*error));
  } else {
    operation->handle->complete();
  }
  seat_.announce_change();
}

void Engine::report_stuck() {
  if (Clock::now() - stuck_since_ < kStuckAfter) return;
  std::fprintf(stderr, "horovodish: warning: %s\n", stuck_text_.c_str());
  stuck_text_.clear();
}

}  // namespace horovodish
