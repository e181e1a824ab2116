// A queue of work with its own thread: the stand-in for a CUDA stream.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace pretend {

constexpr int kAnyDevice = -1;

class Stream {
 public:
  explicit Stream(int device) : device(device) {
    std::thread([this] { work(); }).detach();
  }
  void push(std::function<void()> what) {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(what));
    changed_.notify_all();
  }
  // While held, the stream does no work.
  void hold(bool held) {
    std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

  const int device;  // kAnyDevice: a framework's, of whichever device is used with it
  bool capturing = false;

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !queue_.empty() && !held_; });
      const auto what = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      lock.unlock();
      what();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // the rest is guarded by mutex_, too
  bool held_ = false, busy_ = false;
};

Stream& stream_of(void* stream);
void push(void* stream, std::function<void()> what);
// Returns whether the calling thread may use objects of this device: the device's context must be on top of the
// thread's stack.
bool in_context(int device = kAnyDevice);
int current_device();  // kAnyDevice: there is no context

}  // namespace pretend
