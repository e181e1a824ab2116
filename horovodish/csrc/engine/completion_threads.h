// Threads that call `then` of a settled operation. A call may take long, wait, and call frameworks. The engine's thread
// must not do that: XLA runs the rest of a program on the thread that reports the end of an operation.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>

#include "operation/operation.h"

namespace horovodish {

class CompletionThreads {
 public:
  // Waits for at most a second for the calls that are under way or queued. Longer calls go on by themselves.
  ~CompletionThreads();
  // Starts the first thread, which run() needs. Throws std::system_error if the system refuses the thread.
  void prepare();
  // Queues a call of `operation->then`; prepare() must come before. A call may wait for another operation, even for one
  // that settles later, so run() starts a thread whenever all are busy. If the system refuses the thread, the call
  // waits for a busy one.
  void run(const std::shared_ptr<Operation>& operation) noexcept;

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    // The queue, linked by Operation::next: it needs no memory of its own. Guarded by mutex, like the rest.
    std::shared_ptr<Operation> first;
    Operation* last = nullptr;
    size_t queued = 0, threads = 0, idle = 0;
    bool closing = false;
  };
  // The caller holds the lock.
  static void start_thread(const std::shared_ptr<Shared>& shared);
  static void work(const std::shared_ptr<Shared>& shared);

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace horovodish
