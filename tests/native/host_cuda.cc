// The CUDA driver functions that the engine calls, over host memory: for tests on machines without a GPU.
//
// Host memory counts as device memory. A stream is a queue with a thread that works it off, so work that no event
// orders runs at any time. A test can hold a stream to see who waits for it. These functions prove nothing about speed.
//
// They refuse calls that CUDA refuses or lets pass in silence: a call without the context of the device of its stream
// or event, an event that was never recorded, anything that breaks a capture, memory that is freed twice or misaligned.
// Memory is full of garbage when it is allocated and when it is freed.
//
//     PRETEND_GPUS          how many devices there are; 1 if unset. All ranks of a host see the same.
//     PRETEND_NO_COMPILER   if set, the driver compiles no kernel.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <vector>

#include "host_stream.h"

namespace {

using pretend::Stream;

struct Event {
  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, come = 0;  // guarded by mutex
};

constexpr int kInvalidValue = 1, kInvalidDevice = 101, kInvalidContext = 201, kInvalidHandle = 400, kNotReady = 600,
              kIllegalAddress = 700, kCaptureUnsupported = 900, kCaptureImplicit = 906;
constexpr int kRelaxed = 2;
constexpr int kGarbage = 0xA5;
constexpr size_t kMostDevices = 64;

int contexts[kMostDevices];  // a context is the address of its device's place
thread_local std::vector<void*> pushed;
thread_local int capture_mode = 0;  // global, as CUDA's default
std::atomic<int> captures{0};
std::atomic<bool> broken{false};

std::mutex memory_mutex;
std::map<unsigned long long, size_t> memory;  // allocated memory: bytes by address; guarded by memory_mutex

int device_count() {
  const char* text = std::getenv("PRETEND_GPUS");
  return text == nullptr ? 1 : std::atoi(text);
}

int device_at(void* place) { return static_cast<int>(static_cast<int*>(place) - contexts); }

// Why the calling thread may not hand something to a stream; 0 if it may.
int problem_of(void* handle) {
  const Stream& stream = pretend::stream_of(handle);
  if (!pretend::in_context(stream.device)) return kInvalidContext;
  if (stream.capturing) return kCaptureUnsupported;
  return handle == nullptr && captures > 0 ? kCaptureImplicit : 0;
}

int push_checked(void* stream, std::function<void()> what) {
  if (const int problem = problem_of(stream)) return problem;
  pretend::push(stream, std::move(what));
  return 0;
}

template <class T>
int fill(unsigned long long target, T value, size_t count, void* stream) {
  if (target % sizeof(T) != 0) return kInvalidValue;
  return push_checked(stream, [=] {
    auto* at = reinterpret_cast<T*>(target);
    for (size_t i = 0; i < count; ++i) at[i] = value;
  });
}

}  // namespace

namespace pretend {

Stream& stream_of(void* stream) {
  static auto* const legacy = new Stream(kAnyDevice);
  return stream == nullptr ? *legacy : *static_cast<Stream*>(stream);
}

void push(void* stream, std::function<void()> what) { stream_of(stream).push(std::move(what)); }

int current_device() { return pushed.empty() ? kAnyDevice : device_at(pushed.back()); }

bool in_context(int device) { return !pushed.empty() && (device == kAnyDevice || device == current_device()); }

}  // namespace pretend

extern "C" {

// For the tests.
void* pretend_stream() { return new Stream(pretend::kAnyDevice); }
void pretend_hold(void* stream, int held) { pretend::stream_of(stream).hold(held != 0); }
void pretend_wait(void* stream) { pretend::stream_of(stream).wait(); }
// While a capture is under way, calls that break it are refused.
void pretend_capture(void* stream, int capturing) {
  pretend::stream_of(stream).capturing = capturing != 0;
  captures += capturing != 0 ? 1 : -1;
}
// Adds to float32 values, in the order of the stream.
void pretend_add(void* stream, float* values, size_t count, float summand) {
  pretend::push(stream, [=] {
    for (size_t i = 0; i < count; ++i) values[i] += summand;
  });
}
// From now on the process's GPU has failed, as after a kernel with a bug in it.
void pretend_break() { broken = true; }
// How many pieces of memory are allocated.
size_t pretend_allocations() {
  std::lock_guard lock(memory_mutex);
  return memory.size();
}
size_t pretend_allocated_bytes() {
  std::lock_guard lock(memory_mutex);
  return std::accumulate(memory.begin(), memory.end(), size_t{0},
                         [](size_t sum, const auto& entry) { return sum + entry.second; });
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetErrorName(int error, const char** name) {
  switch (error) {
    case kIllegalAddress:
      *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
      break;
    case kInvalidDevice:
      *name = "CUDA_ERROR_INVALID_DEVICE";
      break;
    case kInvalidContext:
      *name = "CUDA_ERROR_INVALID_CONTEXT";
      break;
    case kInvalidHandle:
      *name = "CUDA_ERROR_INVALID_HANDLE";
      break;
    case kCaptureUnsupported:
      *name = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
      break;
    case kCaptureImplicit:
      *name = "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
      break;
    default:
      *name = "CUDA_ERROR_INVALID_VALUE";
  }
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "of the library that stands in for CUDA";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < device_count() ? 0 : kInvalidDevice;
}
int cuDeviceGetName(char* name, int length, int) {
  std::strncpy(name, "Pretended GPU", static_cast<size_t>(length));
  return 0;
}
int cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  std::memset(uuid, 7, 16);
  uuid[0] = static_cast<unsigned char>(device);
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = &contexts[device];
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  if (context == nullptr) return kInvalidContext;
  pushed.push_back(context);
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  if (pushed.empty()) return kInvalidContext;
  *context = pushed.back();
  pushed.pop_back();
  return 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return pretend::in_context() ? 0 : kInvalidContext;
}
int cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
  if (!pretend::in_context()) return kInvalidContext;
  *stream = new Stream(pretend::current_device());
  return flags == 1 ? 0 : kInvalidValue;  // it would wait for the legacy default stream
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(capture_mode, *mode);
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  if (!pretend::in_context()) return kInvalidContext;
  *status = pretend::stream_of(stream).capturing ? 1 : 0;
  return stream == nullptr && captures > 0 ? kCaptureImplicit : 0;
}
int cuEventCreate(void** event, unsigned flags) {
  if (!pretend::in_context()) return kInvalidContext;
  *event = new Event{pretend::current_device()};
  return flags == 2 ? 0 : kInvalidValue;  // an event that tells the time makes streams slow
}
int cuEventRecord(void* handle, void* stream) {
  auto* const event = static_cast<Event*>(handle);
  if (!pretend::in_context(event->device)) return kInvalidContext;
  std::lock_guard lock(event->mutex);
  const uint64_t number = event->recorded + 1;
  const int result = push_checked(stream, [event, number] {
    std::lock_guard inner(event->mutex);
    event->come = std::max(event->come, number);
    event->changed.notify_all();
  });
  if (result == 0) event->recorded = number;
  return result;
}
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  auto* const event = static_cast<Event*>(handle);
  std::lock_guard lock(event->mutex);
  if (event->recorded == 0) return kInvalidHandle;  // CUDA would not wait at all
  return push_checked(stream, [event, number = event->recorded] {
    std::unique_lock inner(event->mutex);
    event->changed.wait(inner, [&] { return event->come >= number; });
  });
}
int cuEventQuery(void* handle) {
  auto* const event = static_cast<Event*>(handle);
  if (captures > 0 && capture_mode != kRelaxed) return kCaptureUnsupported;
  std::lock_guard lock(event->mutex);
  if (event->recorded == 0) return kInvalidHandle;  // CUDA would say that it has come
  if (broken) return kIllegalAddress;
  return event->come == event->recorded ? 0 : kNotReady;
}
int cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = size_t{16} << 30;
  return 0;
}
int cuMemPoolCreate(void** pool, const int* options) {
  *pool = &contexts[options[3]];  // of which device it is
  return options[0] == 1 && options[2] == 1 ? 0 : kInvalidValue;
}
int cuMemPoolSetAttribute(void*, int attribute, void*) { return attribute == 4 ? 0 : kInvalidValue; }
int cuMemAllocFromPoolAsync(unsigned long long* pointer, size_t bytes, void* pool, void* stream) {
  if (const int problem = bytes == 0 || !pretend::in_context(device_at(pool)) ? kInvalidValue : problem_of(stream)) {
    return problem;
  }
  void* const made = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  std::memset(made, kGarbage, bytes);
  *pointer = reinterpret_cast<unsigned long long>(made);
  std::lock_guard lock(memory_mutex);
  memory.emplace(*pointer, bytes);
  return 0;
}
int cuMemFreeAsync(unsigned long long pointer, void* stream) {
  if (const int problem = problem_of(stream)) return problem;
  std::lock_guard lock(memory_mutex);
  const auto freed = memory.extract(pointer);
  if (freed.empty()) return kInvalidValue;
  pretend::push(stream, [pointer, bytes = freed.mapped()] {
    std::memset(reinterpret_cast<void*>(pointer), kGarbage, bytes);
    std::free(reinterpret_cast<void*>(pointer));
  });
  return 0;
}
int cuMemcpyDtoDAsync_v2(unsigned long long target, unsigned long long source, size_t bytes, void* stream) {
  return push_checked(
      stream, [=] { std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes); });
}
int cuModuleLoadData(void** module, const char* text) {
  if (std::getenv("PRETEND_NO_COMPILER") != nullptr) return kInvalidValue;
  *module = const_cast<char*>(text);
  return pretend::in_context() ? 0 : kInvalidContext;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  const bool has_it =
      std::string(static_cast<char*>(module)).find(".entry " + std::string(name) + "(") != std::string::npos;
  *function = module;
  return has_it ? 0 : kInvalidValue;
}
// The only kernel is the engine's, which copies a piece for each number in the grid's second direction.
int cuLaunchKernel(void*, unsigned grid_x, unsigned grid_y, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void* stream, void** parameters, void**) {
  struct Copy {
    char* target;
    const char* source;
    uint64_t bytes;
  };
  if (grid_x == 0 || grid_y == 0 || grid_y > 160) return kInvalidValue;
  const auto* const first = static_cast<const Copy*>(parameters[0]);
  return push_checked(stream, [copies = std::vector<Copy>(first, first + grid_y)] {
    for (const Copy& copy : copies) std::memmove(copy.target, copy.source, copy.bytes);
  });
}
int cuMemsetD8Async(unsigned long long target, unsigned char value, size_t count, void* stream) {
  return fill(target, value, count, stream);
}
int cuMemsetD16Async(unsigned long long target, unsigned short value, size_t count, void* stream) {
  return fill(target, value, count, stream);
}
int cuMemsetD32Async(unsigned long long target, unsigned value, size_t count, void* stream) {
  return fill(target, value, count, stream);
}
int cuMemsetD2D32Async(unsigned long long target, size_t pitch, unsigned value, size_t width, size_t height,
                       void* stream) {
  if (target % sizeof value != 0 || pitch % sizeof value != 0) return kInvalidValue;
  return push_checked(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      auto* at = reinterpret_cast<unsigned*>(target + row * pitch);
      for (size_t i = 0; i < width; ++i) at[i] = value;
    }
  });
}

}  // extern "C"
