// Whether a process sleeps as a whole. A program of JAX or a function of TensorFlow waits for its operations without calling the
// engine. Then nobody but the kernel knows whether something in the process goes on that will submit an operation.
#pragma once

#include <chrono>
#include <map>
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
// while a thread of Python sleeps for a given time, and while any thread reads a file or a socket, waits for another process, or
// works with a GPU. Sleep by nanosleep() and timed waits of Abseil count as sleep without an end: threads of TensorFlow and XLA look
// around in that way.
bool process_sleeps(const std::vector<int>& waiting);

// Tells whether a thread computes that has used no collective yet, and may do so next.
class ComputingThreads {
 public:
  // Return whether a thread, other than `waiting` and those in the background, has run, or waited for a core, for half of the
  // time since the last look. False at the first look, and where the system does not tell.
  bool look(const std::vector<int>& waiting);
  void forget() { times_.clear(); }

 private:
  static constexpr int kShare = 2;

  std::map<int, std::chrono::nanoseconds> times_;  // that threads had run, or waited for a core, at the last look
  std::chrono::steady_clock::time_point looked_{};
};

}  // namespace horovodish
