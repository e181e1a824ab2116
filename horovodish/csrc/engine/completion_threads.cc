#include "engine/completion_threads.h"

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include "memory/sleeping_process.h"
#include "memory/thread_setup.h"

namespace horovodish {

namespace {
constexpr std::chrono::seconds kCloseLimit{1};
// A thread without work for this long ends, unless it is the last one.
constexpr std::chrono::seconds kIdleLimit{10};
}  // namespace

CompletionThreads::~CompletionThreads() {
  std::unique_lock lock(shared_->mutex);
  shared_->closing = true;
  shared_->changed.notify_all();
  shared_->changed.wait_for(lock, kCloseLimit, [this] { return shared_->threads == 0; });
}

void CompletionThreads::prepare() {
  std::lock_guard lock(shared_->mutex);
  if (shared_->threads == 0) start_thread(shared_);
}

void CompletionThreads::run(const std::shared_ptr<Operation>& operation) noexcept {
  std::lock_guard lock(shared_->mutex);
  (shared_->last == nullptr ? shared_->first : shared_->last->next) = operation;
  shared_->last = operation.get();
  if (++shared_->queued > shared_->idle) {
    try {
      start_thread(shared_);
    } catch (const std::exception&) {  // no more threads, or no memory: an existing thread takes the operation later
    }
  }
  shared_->changed.notify_one();
}

void CompletionThreads::start_thread(const std::shared_ptr<Shared>& shared) {
  const NewThreadsAnywhere cores;
  std::thread(work, shared).detach();
  ++shared->threads;
}

void CompletionThreads::work(const std::shared_ptr<Shared>& shared) {
  set_up_thread(kCompletionThread);
  std::unique_lock lock(shared->mutex);
  while (true) {
    ++shared->idle;
    const bool called =
        shared->changed.wait_for(lock, kIdleLimit, [&] { return shared->first != nullptr || shared->closing; });
    --shared->idle;
    if (!called && shared->threads > 1) break;
    if (!called) continue;
    if (shared->first == nullptr) break;
    const auto operation = std::exchange(shared->first, std::move(shared->first->next));
    if (shared->first == nullptr) shared->last = nullptr;
    --shared->queued;
    lock.unlock();
    operation->then(operation->handle);
    operation->then = nullptr;
    lock.lock();
  }
  --shared->threads;
  shared->changed.notify_all();
}

}  // namespace horovodish
