// Whether a process sleeps as a whole. A program of JAX or a function of TensorFlow waits for its operations without calling the
// engine. Then nobody but the kernel knows whether something in the process goes on that will submit an operation.
#pragma once

#include <vector>

namespace horovodish {

// The name of the threads that call native code back. One without work waits for a time and then ends.
inline constexpr const char* kCompletionThread = "horovodish-then";

// The engine and MPI have threads that look at sockets or at the time. They submit nothing and wake nobody who does.
// `thread`: as gettid() gives it.
void add_background_thread(int thread) noexcept;
void remove_background_thread(int thread) noexcept;

// The calling thread is such a thread for the length of a scope.
class BackgroundThread {
 public:
  BackgroundThread();
  ~BackgroundThread();
  BackgroundThread(const BackgroundThread&) = delete;
  BackgroundThread& operator=(const BackgroundThread&) = delete;
};

// Return whether every other thread of this process sleeps until another one wakes it, so that nothing can be submitted before
// an operation ends. `waiting`: threads that wait for operations of the engine. False where the system does not tell, and
// while any thread sleeps for a given time, reads a file or a socket, waits for another process, or works with a GPU. But threads of
// TensorFlow and XLA look around from time to time: sleep by nanosleep() of those with a name, sleep of 10 seconds and more of those
// without, and the timed waits of Abseil count as sleep without an end.
bool process_sleeps(const std::vector<int>& waiting);

}  // namespace horovodish
