// A caller follows one operation with this handle. It is settled exactly once, by a result or by an error. A device
// may still lose the result.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "gpu/device.h"

namespace horovodish {

enum class ErrorKind {
  internal,
  mismatch,
  duplicate_name,
  rank_lost,
  stalled,
  engine_stopped,
  forked_process,
  bad_argument  // on this rank alone
};

// The classes are in horovodish.errors. The last one is Python's own.
inline constexpr std::array kErrorClasses{"HorovodInternalError", "MismatchError", "DuplicateNameError",
                                          "RankLostError",        "StallError",    "EngineStoppedError",
                                          "ForkedProcessError",   "ValueError"};
inline const char* class_name(ErrorKind kind) { return kErrorClasses[static_cast<size_t>(kind)]; }

struct Error {
  ErrorKind kind = ErrorKind::internal;
  std::string message;
  std::string remedy = {};  // follows the message that the caller sees; empty: none
};
// The message when memory runs out. It fits into std::string without an allocation.
inline constexpr const char* kOutOfMemory = "out of memory";

class Handle {
 public:
  struct Output {  // memory that the engine allocated for a result whose size no rank knew beforehand
    std::unique_ptr<std::byte[]> data;  // null if the output is on a device
    size_t bytes = 0;
    std::vector<int64_t> rows;  // the number of rows from each rank
    std::unique_ptr<DeviceMemory> on_device = nullptr;
  };

  explicit Handle(uint64_t id) : id_(id) {}

  uint64_t id() const { return id_; }
  bool settled() const { return state_.load(std::memory_order_acquire) != State::pending; }
  // The rest may be read once the handle is settled.
  const Error* error() const { return state_.load(std::memory_order_acquire) == State::failed ? &error_ : nullptr; }
  // Also set for an operation that failed while a GPU worked on it.
  DeviceEvent* event() const { return event_.get(); }

  void complete(std::shared_ptr<DeviceEvent> event) {
    event_ = std::move(event);
    state_.store(State::done, std::memory_order_release);
  }
  void fail(Error error, std::shared_ptr<DeviceEvent> event = nullptr) {
    error_ = std::move(error);
    event_ = std::move(event);
    state_.store(State::failed, std::memory_order_release);
  }
  // The device's work for the completed operation is about to be aborted. The work's event comes all the same, so call
  // this before the abort. Whoever sees the event then asks for the error.
  void lose(const Error& why) noexcept {
    try {
      error_ = why;
    } catch (const std::bad_alloc&) {
      error_ = {why.kind, kOutOfMemory};
    }
    state_.store(State::failed, std::memory_order_release);
  }

  int process_set = 0;  // the operation's process set; known once it is enqueued
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
