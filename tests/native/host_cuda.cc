// The CUDA driver functions that the engine calls, over host memory: for tests on machines without a GPU.
//
// Memory of the host counts as memory of the device. Streams are queues that a thread each works off, so that what is
// not ordered by events runs at any time, and a stream can be held to see who waits for it. It proves nothing about speed.
//
//     PRETEND_GPUS   how many devices there are; 1 if unset. All ranks of a host see the same.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "host_stream.h"

namespace {

using pretend::Stream;

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, come = 0;  // guarded by mutex
};

constexpr int kInvalidValue = 1, kInvalidDevice = 101, kNotReady = 600;
thread_local int depth = 0;  // of contexts

int device_count() {
  const char* text = std::getenv("PRETEND_GPUS");
  return text == nullptr ? 1 : std::atoi(text);
}

template <class T>
int fill(unsigned long long target, T value, size_t count, void* stream) {
  pretend::push(stream, [=] {
    auto* at = reinterpret_cast<T*>(target);
    for (size_t i = 0; i < count; ++i) at[i] = value;
  });
  return 0;
}

}  // namespace

namespace pretend {

Stream& stream_of(void* stream) {
  static auto* const legacy = new Stream;
  return stream == nullptr ? *legacy : *static_cast<Stream*>(stream);
}

void push(void* stream, std::function<void()> what) { stream_of(stream).push(std::move(what)); }

bool in_context() { return depth > 0; }

}  // namespace pretend

extern "C" {

// For the tests.
void* pretend_stream() { return new Stream; }
void pretend_hold(void* stream, int held) { pretend::stream_of(stream).hold(held != 0); }
void pretend_wait(void* stream) { pretend::stream_of(stream).wait(); }
void pretend_capture(void* stream, int capturing) { pretend::stream_of(stream).capturing = capturing; }
// Adds to float32 values, in the order of the stream.
void pretend_add(void* stream, float* values, size_t count, float summand) {
  pretend::push(stream, [=] {
    for (size_t i = 0; i < count; ++i) values[i] += summand;
  });
}

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuGetErrorName(int error, const char** name) {
  *name = error == kInvalidDevice ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_INVALID_VALUE";
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
  static int contexts[64];
  *context = &contexts[device];
  return 0;
}
int cuCtxPushCurrent_v2(void*) {
  ++depth;
  return 0;
}
int cuCtxPopCurrent_v2(void** context) {
  *context = nullptr;
  return --depth < 0 ? kInvalidValue : 0;
}
int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}
int cuStreamCreateWithPriority(void** stream, unsigned, int) {
  *stream = new Stream;
  return pretend::in_context() ? 0 : kInvalidValue;
}
int cuThreadExchangeStreamCaptureMode(int* mode) {
  static thread_local int current = 0;
  std::swap(current, *mode);
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  *status = pretend::stream_of(stream).capturing;
  return 0;
}
int cuEventCreate(void** event, unsigned) {
  *event = new Event;
  return 0;
}
int cuEventRecord(void* handle, void* stream) {
  auto* const event = static_cast<Event*>(handle);
  std::lock_guard lock(event->mutex);
  const uint64_t number = ++event->recorded;
  pretend::push(stream, [event, number] {
    std::lock_guard inner(event->mutex);
    event->come = std::max(event->come, number);
    event->changed.notify_all();
  });
  return pretend::in_context() ? 0 : kInvalidValue;
}
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  auto* const event = static_cast<Event*>(handle);
  std::lock_guard lock(event->mutex);
  pretend::push(stream, [event, number = event->recorded] {
    std::unique_lock inner(event->mutex);
    event->changed.wait(inner, [&] { return event->come >= number; });
  });
  return pretend::in_context() ? 0 : kInvalidValue;
}
int cuEventQuery(void* handle) {
  auto* const event = static_cast<Event*>(handle);
  std::lock_guard lock(event->mutex);
  return event->come == event->recorded ? 0 : kNotReady;
}
int cuMemAllocAsync(unsigned long long* pointer, size_t bytes, void*) {
  *pointer = reinterpret_cast<unsigned long long>(std::malloc(bytes));
  return 0;
}
int cuMemFreeAsync(unsigned long long pointer, void* stream) {
  pretend::push(stream, [pointer] { std::free(reinterpret_cast<void*>(pointer)); });
  return 0;
}
int cuMemcpyDtoDAsync_v2(unsigned long long target, unsigned long long source, size_t bytes, void* stream) {
  pretend::push(stream,
                [=] { std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), bytes); });
  return pretend::in_context() ? 0 : kInvalidValue;
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
  pretend::push(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      auto* at = reinterpret_cast<unsigned*>(target + row * pitch);
      for (size_t i = 0; i < width; ++i) at[i] = value;
    }
  });
  return 0;
}

}  // extern "C"
