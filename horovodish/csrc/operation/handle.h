// How a caller follows one operation. A handle is settled exactly once, by a result or by an error.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace horovodish {

// Names of the classes in horovodish.errors.
enum class ErrorKind { internal, mismatch, duplicate_name, rank_lost, stalled, engine_stopped, forked_process };

inline constexpr std::array kErrorClasses{"HorovodInternalError", "MismatchError", "DuplicateNameError",
                                          "RankLostError",        "StallError",    "EngineStoppedError",
                                          "ForkedProcessError"};
inline const char* class_name(ErrorKind kind) { return kErrorClasses[static_cast<size_t>(kind)]; }

struct Error {
  ErrorKind kind = ErrorKind::internal;
  std::string message;
  std::string remedy = {};  // follows the message in what the caller sees; empty for none
};
// The message when memory runs out. It fits into std::string without an allocation.
inline constexpr const char* kOutOfMemory = "out of memory";

// Completion of work on a device. Host memory needs none: it is final once the handle is settled. A device plane
// settles the handle when the work is launched and leaves its event here, on which the caller's stream is made to wait.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Makes a stream wait for it; the calling thread does not wait.
  virtual void order_after(uintptr_t stream) = 0;
  // Whether it has come, or never will because the device failed.
  virtual bool done() = 0;
  // Throws std::runtime_error when the device has failed.
  virtual void check() = 0;

  // The work is about to be aborted. The event then comes all the same, so this must be called before. Only the first call counts.
  void lose(const Error& why) noexcept {
    if (is_lost_.load(std::memory_order_relaxed)) return;
    try {
      why_ = why;
    } catch (const std::bad_alloc&) {
      why_ = {why.kind, kOutOfMemory};
    }
    is_lost_.store(true, std::memory_order_release);
  }
  // Why the work never came to its end; null if nothing is known against it. An event that has come says nothing before this is asked.
  const Error* loss() const { return is_lost_.load(std::memory_order_acquire) ? &why_ : nullptr; }

 private:
  std::atomic<bool> is_lost_{false};
  Error why_;
};

// Memory of a device, given back in the order of the stream that it was allocated for, unless another one is named.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual std::byte* data() = 0;
  // Copies it to memory of the framework's on a stream that is ordered after the operation, and gives it back.
  virtual void move_to(std::byte* target, uintptr_t stream) = 0;
  virtual void give_back(uintptr_t stream) = 0;
};

class Handle {
 public:
  struct Output {  // memory that the engine allocated for a result whose size no rank knew beforehand
    std::unique_ptr<std::byte[]> data;  // null where it is on a device
    size_t bytes = 0;
    std::vector<int64_t> rows;  // that came from every rank
    std::unique_ptr<DeviceMemory> on_device = nullptr;
  };

  explicit Handle(uint64_t id) : id_(id) {}

  uint64_t id() const { return id_; }
  bool settled() const { return state_.load(std::memory_order_acquire) != State::pending; }
  // The rest may be read once the handle is settled.
  const Error* error() const {
    const State state = state_.load(std::memory_order_acquire);
    if (state == State::failed) return &error_;
    return state == State::done && event_ ? event_->loss() : nullptr;
  }
  // Also of an operation that failed when a GPU was at work on it.
  DeviceEvent* event() const { return event_.get(); }

  void complete(std::shared_ptr<DeviceEvent> event = nullptr) {
    event_ = std::move(event);
    state_.store(State::done, std::memory_order_release);
  }
  void fail(Error error, std::shared_ptr<DeviceEvent> event = nullptr) {
    error_ = std::move(error);
    event_ = std::move(event);
    state_.store(State::failed, std::memory_order_release);
  }

  int process_set = 0;  // of the operation; known once it is enqueued
  std::vector<Output> outputs;
  int last_joined = -1;  // of a join: the rank that joined last
  int sender = -1;  // of a receive: the rank that sent

 private:
  enum class State : uint32_t { pending, done, failed };

  const uint64_t id_;
  std::atomic<State> state_{State::pending};
  Error error_;
  std::shared_ptr<DeviceEvent> event_;
};

}  // namespace horovodish
