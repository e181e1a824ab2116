// Finds out whether a whole process sleeps. A JAX program or a TensorFlow function waits for its operations without
// calling the engine. Then only the kernel knows whether some thread will submit another operation.
#pragma once

#include <vector>

namespace horovodish {

// The name of the threads that call native code back. Without work they wait for a time and then end.
inline constexpr const char* kCompletionThread = "horovodish-then";

// Registers a thread of the engine or of MPI that only looks at sockets or at the time. Such threads submit nothing and
// wake nobody who does.
// `thread`: as gettid() gives it.
void add_background_thread(int thread) noexcept;
void remove_background_thread(int thread) noexcept;

// Sets up the calling thread, see thread_setup.h, which is such a thread for the length of a scope.
class BackgroundThread {
 public:
  explicit BackgroundThread(const char* name);
  ~BackgroundThread();
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;
};

// Returns whether every other thread of this process sleeps until another one wakes it, so that nothing can be
// submitted before an operation ends. `waiting`: threads that wait for operations of the engine. False if the system
// does not tell, or if any thread sleeps for a given time, reads a file or a socket, waits for another process, or
// works with a GPU. There are exceptions for threads of TensorFlow and XLA, which look around from time to time. These
// count as sleep without an end: nanosleep() of named threads, sleep of 10 seconds and more of unnamed ones, and the
// timed waits of Abseil.
bool process_sleeps(const std::vector<int>& waiting);

}  // namespace horovodish
