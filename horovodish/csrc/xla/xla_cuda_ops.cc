#include "xla/xla_handlers.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/frontend.h"
#include "gpu/device.h"
#include "xla/xla_call.h"
#include "xla/xla_layout.h"

namespace horovodish {

namespace {

// As in CUDA's own allocations.
constexpr size_t kAlignment = 256;
// How often a waiting `done` checks whether the engine has stopped.
constexpr std::chrono::milliseconds kWaitSlice{50};

// One execution of a program.
struct Execution {
  int64_t id = 0;
  int device = 0;
  uintptr_t stream = 0;
};

Execution execution_of(const xla::CallFrame& frame) {
  const xla::Api& api = *frame.api;
  xla::StreamGetArgs stream{sizeof(stream), nullptr, frame.context, nullptr};
  xla::DeviceOrdinalGetArgs device{sizeof(device), nullptr, frame.context, 0};
  if (api.stream_get(&stream) != nullptr || api.device_ordinal_get(&device) != nullptr) {
    throw std::runtime_error("XLA did not say which GPU and stream the program uses");
  }
  return {run_id_of(frame), device.ordinal, reinterpret_cast<uintptr_t>(stream.stream)};
}

struct CudaCall : StartedCall {
  CudaCall() = default;
  CudaCall(const CudaCall&) = delete;
  ~CudaCall();

  std::unique_ptr<DeviceMemory> memory;  // null after it is given back
  uintptr_t stream = 0;  // of `start`
  Error failure;  // why it was not handed over
};

// If the operation failed or its result was never asked for, the memory returns to the stream, after the GPU's
// remaining work.
CudaCall::~CudaCall() {
  if (!memory || !handle) return;
  try {
    if (handle->event() != nullptr) handle->event()->order_after(stream);
    return;
  } catch (const std::exception&) {  // the GPU has failed, or CUDA has ended with the process
  }
  (void)memory.release();
}

class CudaCalls {
 public:
  // `group`: the group of the operations that belong together. `index`: this one's number in the group.
  struct Key {
    int64_t execution;
    std::string group;
    int64_t index;
    auto operator<=>(const Key&) const = default;
  };

  // If a call has the same key, its program has given it up.
  void add(Key key, std::shared_ptr<CudaCall> call) {
    std::lock_guard lock(mutex_);
    calls_[std::move(key)].swap(call);
  }
  // Null if it has been taken.
  std::shared_ptr<CudaCall> take(const Key& key) {
    std::lock_guard lock(mutex_);
    const auto found = calls_.extract(key);
    return found.empty() ? nullptr : found.mapped();
  }
  // A program ends when a `done` fails, so nobody asks for its other operations. Executions without a number,
  // TensorFlow's, cannot be told apart: there this forgets the operations of the group.
  void forget(const Key& failed) {
    std::lock_guard lock(mutex_);
    std::erase_if(calls_, [&](const auto& entry) {
      const Key& key = entry.first;
      return key.execution == failed.execution && (key.execution != 0 || key.group == failed.group);
    });
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::shared_ptr<CudaCall>> calls_;  // guarded by mutex_
};

CudaCalls& cuda_calls() {
  static auto* const calls = new CudaCalls;  // XLA's threads may use it until the process has ended
  return *calls;
}

Device& device_of(const Execution& execution) {
  static std::atomic<int> used{-1};
  int first = -1;
  if (!used.compare_exchange_strong(first, execution.device) && first != execution.device) {
    throw std::runtime_error("the program runs on GPU " + std::to_string(execution.device) +
                             ", but this process has used GPU " + std::to_string(first) +
                             ", and a rank uses one GPU. Remedy: set CUDA_VISIBLE_DEVICES, or jax_default_device, "
                             "before the first array is made.");
  }
  return Device::get(execution.device);
}

std::shared_ptr<Handle> submitted(const xla::CallFrame& frame, Engine& engine, std::shared_ptr<Request> request,
                                  int process_set, const RankInGroup& place, const Execution& execution,
                                  const std::shared_ptr<CudaCall>& call) {
  Device& device = device_of(execution);
  request->device = execution.device;
  call->stream = execution.stream;
  std::vector<Buffer> buffers;
  {
    const Device::Scope scope(device);
    call->memory = device.allocate(layout_bytes(frame, *request, kAlignment), execution.stream);
    std::vector<DeviceCopy> copies;
    const auto copy = [&](std::byte* to, std::span<std::byte> argument) {
      copies.push_back({to, argument.data(), argument.size()});
    };
    buffers = lay_out(frame, *request, place, call->memory->data(), kAlignment, copy, *call);
    device.copy(copies, execution.stream);
  }
  return submit(engine, std::move(request), std::move(buffers), process_set, call, nullptr, execution.stream);
}

void wait_until_launched(const Handle& handle) {
  while (!handle.settled()) {
    try {
      running_engine()->wait(handle, kWaitSlice);
    } catch (const EngineStopped&) {  // the operation then fails
    }
  }
}

// Puts the copies of the results on the stream, behind the operation.
Error copy_results(CudaCall& call, const std::vector<std::span<std::byte>>& wanted, const Execution& execution) {
  Device& device = device_of(execution);
  if (DeviceEvent* const event = call.handle->event()) event->order_after(execution.stream);
  std::vector<DeviceCopy> copies;
  Error failure =
      collect(call, wanted, [&](std::span<std::byte> to, Handle::Output* output, std::span<std::byte> result) {
        if (output != nullptr) return output->on_device->move_to(to.data(), execution.stream);
        copies.push_back({to.data(), result.data(), result.size()});
      });
  if (!failure.message.empty()) return failure;
  const Device::Scope scope(device);
  device.copy(copies, execution.stream);
  std::exchange(call.memory, nullptr)->give_back(execution.stream);
  return {};
}

CudaCalls::Key key_of(const xla::CallFrame& frame, const Execution& execution) {
  return {execution.id, std::string(given_text(frame, "group")), given_number(frame, "index")};
}

}  // namespace

xla::Error* xla_cuda_start(xla::CallFrame* frame) {
  return handled(*frame, [&]() -> Error {
    const Execution execution = execution_of(*frame);
    const auto call = std::make_shared<CudaCall>();
    call->failure =
        start(*frame, *call, [&](Engine& engine, std::shared_ptr<Request> request, int set, const RankInGroup& place) {
          return submitted(*frame, engine, std::move(request), set, place, execution, call);
        });
    cuda_calls().add(key_of(*frame, execution), call);
    return {};
  });
}

xla::Error* xla_cuda_done(xla::CallFrame* frame) {
  return handled(*frame, [&]() -> Error {
    const Execution execution = execution_of(*frame);
    const CudaCalls::Key key = key_of(*frame, execution);
    const auto call = cuda_calls().take(key);
    if (!call) throw std::runtime_error("the result of an operation was asked for twice");
    Error failure = call->failure;
    if (call->handle) {
      wait_until_launched(*call->handle);
      failure = failure_of(*call->handle);
    }
    std::vector<std::span<std::byte>> results = memory_of(frame->results);
    results.erase(results.begin());  // the number
    if (failure.message.empty()) failure = copy_results(*call, results, execution);
    if (!failure.message.empty()) cuda_calls().forget(key);
    return failure;
  });
}

}  // namespace horovodish
