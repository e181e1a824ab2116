// What every thread of the engine does first.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace horovodish {

// Signals are for the interpreter's main thread. `name` is at most 15 characters, shown by ps and debuggers.
inline void set_up_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace horovodish
