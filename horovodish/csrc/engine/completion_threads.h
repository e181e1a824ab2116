// Threads that call `then` of an operation when it has settled. That may take long, wait, and call frameworks, none of which the
// engine's thread could afford: XLA runs the rest of a program in whoever says that an operation is complete.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>

#include "operation/operation.h"

namespace horovodish {

class CompletionThreads {
 public:
  // Waits for the calls that are under way or queued, for a second at most. What takes longer goes on by itself.
  ~CompletionThreads();
  // Starts the first thread, without which run() could call nothing. Throws std::system_error where the system refuses it.
  void prepare();
  // Has `operation->then` called; prepare() came before. A call may wait for another operation, even one that is settled later, so a
  // thread is started whenever all are busy. Only where the system refuses one, the operation waits for a busy one.
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
