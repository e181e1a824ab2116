// The first steps of every thread of the engine, and the cores of the threads that it starts.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <initializer_list>

namespace horovodish {

// The interpreter's main thread takes signals. This thread takes only the signals of its own crash, so that Python's
// faulthandler shows all stacks; with these blocked, it would end the process without a word. `name`: at most 15
// characters, shown by ps and debuggers.
inline void set_up_thread(const char* name) {
  sigset_t blocked;
  sigfillset(&blocked);
  for (int of_a_crash : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&blocked, of_a_crash);
  pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
  pthread_setname_np(pthread_self(), name);
}

// Threads that the calling thread starts within this scope run on the cores of the process's main thread. The engine's
// thread may be bound to one core (HOROVODISH_THREAD_AFFINITY), and new threads would inherit that.
class NewThreadsAnywhere {
 public:
  NewThreadsAnywhere() {
    cpu_set_t anywhere;
    widened_ = sched_getaffinity(0, sizeof own_, &own_) == 0 &&
               sched_getaffinity(getpid(), sizeof anywhere, &anywhere) == 0 && !CPU_EQUAL(&own_, &anywhere) &&
               sched_setaffinity(0, sizeof anywhere, &anywhere) == 0;
  }
  ~NewThreadsAnywhere() {
    if (widened_) sched_setaffinity(0, sizeof own_, &own_);
  }
  NewThreadsAnywhere(const NewThreadsAnywhere&) = delete;
  NewThreadsAnywhere& operator=(const NewThreadsAnywhere&) = delete;

 private:
  cpu_set_t own_;
  bool widened_ = false;
};

}  // namespace horovodish
