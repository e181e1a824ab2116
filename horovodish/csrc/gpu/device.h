// A CUDA device as the engine uses it: the device's primary context, which frameworks use, too, and one stream for all
// work of the engine, in order. The host never waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "abi/cuda.h"
#include "abi/nccl.h"
#include "arithmetic/types.h"

namespace horovodish {

// Loads the CUDA and NCCL libraries, once for the process. An empty `nccl` means that there is none. Returns NCCL's
// version, 0 for none. Throws std::runtime_error with the library and the reason.
int load_device_libraries(const std::string& cuda, const std::string& nccl);
// Null before load_device_libraries(), or if there is no NCCL.
const abi::Nccl* nccl_library();

class Device;

struct DeviceCopy {
  std::byte* target;
  const std::byte* source;
  uint64_t bytes;
};

// Completion of work on a device. Host memory needs none: it is final once the handle is settled. A plane settles the
// handle when the work is launched, and leaves the event of the work there; the caller's stream waits for that event.
class DeviceEvent {
 public:
  DeviceEvent(Device& device, abi::CuEvent event) : device_(device), event_(event) {}
  ~DeviceEvent();  // the CUDA event is reused afterwards
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  // Makes a stream wait for the event; the calling thread does not wait.
  void order_after(abi::CuStream stream);
  // Returns true if the event has come, or never will because the device failed.
  bool done() const;
  // Throws std::runtime_error when the device has failed.
  void check() const;

 private:
  Device& device_;
  const abi::CuEvent event_;
};

// Memory of a device. It is given back in the order of the stream that it was allocated for, unless another stream is
// named.
class DeviceMemory {
 public:
  DeviceMemory(Device& device, std::byte* data, size_t bytes, abi::CuStream stream)
      : device_(device), data_(data), bytes_(bytes), stream_(stream) {}
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }
  // Copies it to the framework's memory on a stream that is ordered after the operation, and gives it back.
  void move_to(std::byte* target, abi::CuStream stream);
  void give_back(abi::CuStream stream);

 private:
  Device& device_;
  std::byte* data_;
  const size_t bytes_;
  const abi::CuStream stream_;
};

class Device {
 public:
  // The first call makes the device, which is never destroyed. Throws std::runtime_error.
  static Device& get(int ordinal);

  // The calling thread uses the device for the length of a scope, without disturbing a CUDA graph that another thread
  // captures.
  class Scope {
   public:
    explicit Scope(Device& device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const abi::Cuda& cuda_;
    int capture_mode_ = abi::kCudaCaptureModeRelaxed;
  };

  // An event for the work that the stream has been given so far. Throws std::invalid_argument while a CUDA graph is
  // being captured from the stream: the engine would not be part of it. The event's order_after() throws it, too.
  std::shared_ptr<DeviceEvent> record(abi::CuStream stream);

  // Call the next functions within a Scope.
  // The copies are made at once. No target may overlap a source.
  void copy(std::span<const DeviceCopy> copies, abi::CuStream stream);
  std::unique_ptr<DeviceMemory> allocate(size_t bytes, abi::CuStream stream);
  // These two act on the engine's stream.
  // The value that changes no result of `op`, `count` times.
  void fill_identity(DType dtype, ReduceOp op, std::byte* target, size_t count);
  // Memory for the next work on the stream. The next caller reuses it.
  std::byte* scratch(size_t bytes);

  abi::CuStream stream() const { return stream_; }  // the engine's

  int ordinal() const { return ordinal_; }
  const std::string& name() const { return name_; }
  const std::string& uuid() const { return uuid_; }  // 16 bytes

 private:
  friend DeviceEvent;
  friend DeviceMemory;

  explicit Device(int ordinal);
  void check_not_captured(abi::CuStream stream) const;

  const abi::Cuda& cuda_;
  const int ordinal_;
  abi::CuContext context_ = nullptr;
  abi::CuStream stream_ = 0;
  abi::CuFunction copy_kernel_ = nullptr;
  abi::CuPool pool_ = nullptr;
  std::string name_, uuid_;
  std::byte* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;

  std::mutex mutex_;
  std::vector<abi::CuEvent> idle_events_;  // guarded by mutex_
};

}  // namespace horovodish
