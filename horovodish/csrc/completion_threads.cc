#include "completion_threads.h"

#include <chrono>
#include <thread>
#include <utility>

#include "thread_setup.h"

namespace horovodish {

namespace {
constexpr std::chrono::seconds kCloseLimit{1};
}  // namespace

CompletionThreads::~CompletionThreads() {
  std::unique_lock lock(shared_->mutex);
  shared_->closing = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, kCloseLimit, [this] { return shared_->threads == 0; });
}

void CompletionThreads::run(std::function<void()> what) {
  std::lock_guard lock(shared_->mutex);
  shared_->queue.push_back(std::move(what));
  if (shared_->idle >= shared_->queue.size() || shared_->threads == kMostThreads) {
    shared_->changed.notify_one();
    return;
  }
  ++shared_->threads;
  const NewThreadsAnywhere cores;
  std::thread(work, shared_).detach();
}

void CompletionThreads::work(const std::shared_ptr<Shared>& shared) {
  set_up_thread("horovodish-then");
  std::unique_lock lock(shared->mutex);
  while (true) {
    ++shared->idle;
    shared->changed.wait(lock, [&] { return !shared->queue.empty() || shared->closing; });
    --shared->idle;
    if (shared->queue.empty()) break;
    const auto what = std::exchange(shared->queue.front(), nullptr);
    shared->queue.pop_front();
    lock.unlock();
    what();
    lock.lock();
  }
  --shared->threads;
  shared->changed.notify_all();
}

}  // namespace horovodish
