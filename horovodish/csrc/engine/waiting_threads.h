// Which threads of this rank wait for operations, and in which process set. A rank will submit nothing more before the next
// decision of a set only if every thread that ever waits is waiting in that set now. Example: one thread waits for 'gradient',
// and another one, which has waited before, computes what it will submit as 'metric'. Peers that wait for 'metric' will get it.
// A thread that has used no collective yet counts while it computes: it may be about to use its first one.
// A thread that submits and never waits, such as one of TensorFlow's or of autograd's for a GPU, may compute or be idle. See
// memory/sleeping_process.h.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace horovodish {

class WaitingThreads {
  struct State {
    std::mutex mutex;
    size_t known = 0;  // threads that have waited and have not ended; guarded by mutex
    size_t submitters = 0;  // threads that have submitted, but have neither waited nor ended; guarded by mutex
    std::unordered_map<int, std::vector<int>> waiting;  // threads by process set; guarded by mutex
  };

 public:
  // The calling thread waits in this process set, for the length of a scope.
  class Scope {
   public:
    Scope(const WaitingThreads& threads, int process_set) : state_(*threads.state_) {
      std::lock_guard lock(state_.mutex);
      threads_ = &state_.waiting[process_set];
      threads_->push_back(known().id);
    }
    ~Scope() {
      std::lock_guard lock(state_.mutex);
      std::erase(*threads_, known().id);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    State& state_;
    std::vector<int>* threads_;  // elements of an unordered_map do not move
  };

  // Count the calling thread as one that waits for operations, even if its operation is settled already.
  void remember_caller() const {
    const Known& thread = known();
    if (thread.state == state_ && thread.has_waited) return;
    known().join(state_, true);
  }
  // Count the calling thread as one that may submit without waiting.
  void remember_submitter() const {
    if (known().state != state_) known().join(state_, false);
  }
  bool any_only_submits() const {
    std::lock_guard lock(state_->mutex);
    return state_->submitters > 0;
  }
  bool all_wait_in(int process_set) const {
    std::lock_guard lock(state_->mutex);
    const auto found = state_->waiting.find(process_set);
    return found != state_->waiting.end() && !found->second.empty() && found->second.size() == state_->known;
  }
  // In any process set, as gettid() gives them.
  std::vector<int> waiting() const {
    std::lock_guard lock(state_->mutex);
    std::vector<int> threads;
    for (const auto& [set, those] : state_->waiting) threads.insert(threads.end(), those.begin(), those.end());
    return threads;
  }
  // As gettid() gives them.
  std::vector<int> waiting_in(int process_set) const {
    std::lock_guard lock(state_->mutex);
    return state_->waiting[process_set];
  }

 private:
  // A thread that has submitted or waited, until it ends or does so with another engine.
  struct Known {
    std::shared_ptr<State> state;
    bool has_waited = false;
    const int id = gettid();

    ~Known() { leave(); }
    void join(const std::shared_ptr<State>& engine, bool waits) {
      leave();
      state = engine;
      has_waited = waits;
      std::lock_guard lock(state->mutex);
      ++count();
    }
    void leave() {
      if (!state) return;
      std::lock_guard lock(state->mutex);
      --count();
    }
    size_t& count() const { return has_waited ? state->known : state->submitters; }
  };
  static Known& known() {
    thread_local Known known;
    return known;
  }

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace horovodish
