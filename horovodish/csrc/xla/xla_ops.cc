#include "xla/xla_handlers.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arithmetic/copy_bytes.h"
#include "engine/frontend.h"
#include "xla/xla_call.h"
#include "xla/xla_layout.h"

namespace horovodish {

namespace {

// A waiting `done`.
struct Waiter {
  const xla::Api* api;
  xla::Future* future;
  std::vector<std::span<std::byte>> wanted;
};

struct Call : StartedCall {
  int64_t run = 0;  // the run of its program
  std::shared_ptr<std::byte> memory;

  // Guarded by Calls::mutex_.
  bool settled = false;
  Error failure;  // known once it is settled
  std::optional<Waiter> waiter;
};

// Memory for the calls. It keeps used blocks: the pages of fresh memory cost more than the copies into it.
class StagingPool {
 public:
  static constexpr size_t kAlignment = 64;

  StagingPool() { free_.reserve(kMostFree); }

  // Memory that returns to the pool when nobody shares it any more.
  std::shared_ptr<std::byte> take(size_t bytes) {
    std::span<std::byte> taken;
    {
      std::lock_guard lock(mutex_);
      auto best = free_.end();
      for (auto block = free_.begin(); block != free_.end(); ++block) {
        if (block->size() < bytes || block->size() > bytes * kLargestExcess) continue;
        if (best == free_.end() || block->size() < best->size()) best = block;
      }
      if (best != free_.end()) {
        taken = *best;
        free_.erase(best);
      }
    }
    if (taken.empty()) taken = {static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kAlignment})), bytes};
    return {taken.data(), [this, taken](std::byte*) { give_back(taken); }};
  }

 private:
  // Blocks beyond this number are freed, so that programs which no longer run do not keep memory.
  static constexpr size_t kMostFree = 64;
  // A larger block than asked for is taken if at most half of it stays unused.
  static constexpr size_t kLargestExcess = 2;

  void give_back(std::span<std::byte> block) noexcept {
    std::lock_guard lock(mutex_);
    if (free_.size() == kMostFree) {
      ::operator delete(free_.front().data(), std::align_val_t{kAlignment});
      free_.erase(free_.begin());
    }
    free_.push_back(block);
  }

  std::mutex mutex_;
  std::vector<std::span<std::byte>> free_;  // guarded by mutex_
};

StagingPool& pool() {
  static auto* const pool = new StagingPool;  // XLA's threads may use it until the process has ended
  return *pool;
}

// Returns whether an operation has succeeded. Its completion thread may not have reported this yet.
bool has_result(const Call& call) { return call.handle && call.handle->settled() && call.handle->error() == nullptr; }

// The program has handed over everything, so for a moment this thread has nothing better to do.
void drive(const Call& call) {
  if (!call.handle || call.handle->settled()) return;
  try {
    running_engine()->drive(*call.handle, kDriveLimit);
  } catch (const EngineStopped&) {  // the operation then has failed
  }
}

Error copy_results(const Call& call, const std::vector<std::span<std::byte>>& wanted) {
  return collect(call, wanted, [](std::span<std::byte> to, const Handle::Output*, std::span<std::byte> result) {
    if (!to.empty()) copy_bytes(to.data(), result.data(), to.size());
  });
}

// Runs the rest of the program.
void fulfil(const Waiter& waiter, const Error& failure) {
  if (failure.message.empty()) {
    xla::FutureSetAvailableArgs args{sizeof(args), nullptr, waiter.future};
    waiter.api->future_set_available(&args);
  } else {
    xla::FutureSetErrorArgs args{sizeof(args), nullptr, waiter.future, error_of(*waiter.api, failure)};
    waiter.api->future_set_error(&args);
  }
}

// A program ends when a `done` fails: nobody asks for its other operations, and their memory is freed as soon as the
// engine does not need it.
class Calls {
 public:
  int32_t add(std::shared_ptr<Call> call) {
    std::lock_guard lock(mutex_);
    if (std::find(failed_runs_.begin(), failed_runs_.end(), call->run) != failed_runs_.end()) return kForgotten;
    while (static_cast<int32_t>(++last_) == kForgotten || calls_.contains(static_cast<int32_t>(last_))) {
    }
    const auto number = static_cast<int32_t>(last_);
    calls_.emplace(number, std::move(call));
    return number;
  }

  void settle(const std::shared_ptr<Call>& call, const Error& failure) {
    std::optional<Waiter> waiter;
    {
      std::lock_guard lock(mutex_);
      call->settled = true;
      call->failure = failure;
      waiter = std::exchange(call->waiter, std::nullopt);
    }
    if (waiter) fulfil(*waiter, result_of(*call, failure, waiter->wanted));
  }

  // The `done` of an operation: returns the result, or gives the frame a future.
  Error finish(int32_t number, std::vector<std::span<std::byte>> wanted, xla::CallFrame& frame) {
    std::shared_ptr<Call> call;
    {
      std::lock_guard lock(mutex_);
      const auto found = calls_.extract(number);
      if (found.empty() && last_failure_.message.empty()) {
        throw std::runtime_error("the result of an operation was asked for twice");
      }
      // XLA runs the calls of a program concurrently, so this call may come after another one has failed.
      if (found.empty()) return last_failure_;
      call = found.mapped();
    }
    drive(*call);
    Error failure;
    {
      std::lock_guard lock(mutex_);
      if (!call->settled && !has_result(*call)) {
        xla::FutureCreateArgs args{sizeof(args), nullptr, nullptr};
        if (frame.api->future_create(&args) != nullptr) throw std::runtime_error("XLA gave no future");
        frame.future = args.future;
        call->waiter = Waiter{frame.api, args.future, std::move(wanted)};
        return {};
      }
      failure = call->failure;
    }
    return result_of(*call, failure, wanted);
  }

 private:
  static constexpr int32_t kForgotten = 0;
  // If XLA had begun a `start` before its program failed, that `start` comes within moments.
  static constexpr size_t kFailedRuns = 64;

  // Return the failure of a settled operation: `failure` if it has a message, else what copy_results() reports.
  Error result_of(const Call& call, Error failure, const std::vector<std::span<std::byte>>& wanted) {
    if (failure.message.empty()) failure = copy_results(call, wanted);
    if (failure.message.empty()) return {};
    std::lock_guard lock(mutex_);
    last_failure_ = failure;
    std::erase_if(calls_, [&](const auto& entry) { return entry.second->run == call.run; });
    failed_runs_.push_back(call.run);
    if (failed_runs_.size() > kFailedRuns) failed_runs_.pop_front();
    return failure;
  }

  std::mutex mutex_;
  uint32_t last_ = 0;  // wraps around after 2^32 operations; guarded by mutex_
  std::unordered_map<int32_t, std::shared_ptr<Call>> calls_;  // guarded by mutex_
  std::deque<int64_t> failed_runs_;  // the last ones; guarded by mutex_
  Error last_failure_;  // guarded by mutex_
};

Calls& calls() {
  static auto* const calls = new Calls;
  return *calls;
}

// Copies the arguments into the call's memory, and returns the buffers there.
std::vector<Buffer> stage(const xla::CallFrame& frame, Request& request, const RankInGroup& place, Call& call) {
  call.memory = pool().take(layout_bytes(frame, request, StagingPool::kAlignment));
  const auto copy = [](std::byte* to, std::span<std::byte> argument) {
    if (!argument.empty()) copy_bytes(to, argument.data(), argument.size());
  };
  auto buffers = lay_out(frame, request, place, call.memory.get(), StagingPool::kAlignment, copy, call);
  if (request.kind != Kind::barrier) return buffers;
  request.members.clear();  // they only pass through
  return {};
}

}  // namespace

xla::Error* xla_run(xla::CallFrame* frame) {
  return handled(*frame, [&]() -> Error {
    *static_cast<int64_t*>(buffer_at(frame->results, 0).data) = new_run();
    return {};
  });
}

xla::Error* xla_start(xla::CallFrame* frame) {
  return handled(*frame, [&]() -> Error {
    const auto call = std::make_shared<Call>();
    call->run = run_of(*frame);
    const Error failure =
        start(*frame, *call, [&](Engine& engine, std::shared_ptr<Request> request, int set, const RankInGroup& place) {
          auto buffers = stage(*frame, *request, place, *call);
          return submit(engine, std::move(request), std::move(buffers), set, call->memory,
                        [call](const auto& handle) { calls().settle(call, failure_of(*handle)); });
        });
    if (!failure.message.empty()) calls().settle(call, failure);
    *static_cast<int32_t*>(buffer_at(frame->results, 0).data) = calls().add(call);
    return {};
  });
}

xla::Error* xla_done(xla::CallFrame* frame) {
  return handled(*frame, [&]() -> Error {
    const xla::Buffer& numbers = buffer_at(frame->arguments, 0);
    std::vector<std::span<std::byte>> results = memory_of(frame->results);
    const std::span<std::byte> passed_on = results.front();
    results.erase(results.begin());
    if (passed_on.data() != numbers.data) copy_bytes(passed_on.data(), numbers.data, passed_on.size());
    return calls().finish(*static_cast<const int32_t*>(numbers.data), std::move(results), *frame);
  });
}

xla::Error* xla_rest(xla::CallFrame* frame) {
  return handled(*frame, [&]() -> Error {
    const std::span<std::byte> rest = memory_of(frame->results).front();
    const auto* const numbers = static_cast<const int32_t*>(buffer_at(frame->arguments, 0).data);
    copy_bytes(rest.data(), numbers + 1, rest.size());
    return {};
  });
}

}  // namespace horovodish
