// Threads for what is to happen when an operation ends. It may take long, wait, and call frameworks, none of which the
// engine's thread could afford: XLA runs the rest of a program in whoever says that an operation is complete.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace horovodish {

class CompletionThreads {
 public:
  // Waits for what was handed over, for a second at most. What takes longer goes on by itself.
  ~CompletionThreads();
  // Hands `what` over; another thread is started when all are busy.
  void run(std::function<void()> what);

 private:
  static constexpr size_t kMostThreads = 32;

  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> queue;  // the rest is guarded by mutex, too
    size_t threads = 0, idle = 0;
    bool closing = false;
  };
  static void work(const std::shared_ptr<Shared>& shared);

  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace horovodish
