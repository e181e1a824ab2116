// The threads of this process that wait for operations now.
#pragma once

#include <unistd.h>

#include <mutex>
#include <vector>

#include "operation/handle.h"

namespace horovodish {

class WaitingThreads {
 public:
  // The calling thread waits for an operation, for the length of a scope.
  class Scope {
   public:
    Scope(WaitingThreads& threads, const Handle& handle) : threads_(threads), handle_(handle) {
      std::lock_guard lock(threads_.mutex_);
      threads_.scopes_.push_back(this);
    }
    ~Scope() {
      std::lock_guard lock(threads_.mutex_);
      std::erase(threads_.scopes_, this);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    friend WaitingThreads;

    static int own_thread() {
      thread_local const int own = gettid();
      return own;
    }

    WaitingThreads& threads_;
    const Handle& handle_;
    const int thread_ = own_thread();
  };

  // The threads that wait in a process set, by gettid(). A thread whose operation has ended continues as soon as it
  // gets a core.
  std::vector<int> in(int process_set) {
    std::lock_guard lock(mutex_);
    std::vector<int> threads;
    for (const Scope* scope : scopes_) {
      if (scope->handle_.process_set == process_set && !scope->handle_.settled()) threads.push_back(scope->thread_);
    }
    return threads;
  }

 private:
  std::mutex mutex_;
  std::vector<const Scope*> scopes_;  // guarded by mutex_
};

}  // namespace horovodish
