#include "gpu/device.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>

#include "arithmetic/reduce.h"
#include "gpu/copy_kernel.h"

namespace horovodish {

namespace {

// Memory that the engine keeps for its next operations, as a part of the GPU's. To map 64 MiB anew takes an H200 0.2 ms.
constexpr size_t kKeptPart = 16;

struct Libraries {
  std::mutex mutex;
  std::optional<abi::Cuda> cuda;  // until it is set, mutex guards the rest, too; then nothing changes it
  std::optional<abi::Nccl> nccl;
};

// Never destroyed: threads may use them until the process has ended.
Libraries& libraries() {
  static auto* const all = new Libraries;
  return *all;
}

template <class Library>
void load_once(std::optional<Library>& library, const std::string& path) {
  if (library) return;
  try {
    library.emplace(path);
  } catch (const std::exception& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

abi::CuPointer address_of(const void* pointer) { return reinterpret_cast<abi::CuPointer>(pointer); }

}  // namespace

int load_device_libraries(const std::string& cuda, const std::string& nccl) {
  Libraries& all = libraries();
  std::lock_guard lock(all.mutex);
  load_once(all.cuda, cuda);
  if (!nccl.empty()) load_once(all.nccl, nccl);
  return all.nccl ? all.nccl->version : 0;
}

const abi::Nccl* nccl_library() {
  Libraries& all = libraries();
  std::lock_guard lock(all.mutex);
  return all.nccl ? &*all.nccl : nullptr;
}

DeviceEvent::~DeviceEvent() {
  std::lock_guard lock(device_.mutex_);
  device_.idle_events_.push_back(event_);
}

void DeviceEvent::order_after(abi::CuStream stream) {
  const Device::Scope scope(device_);
  device_.check_not_captured(stream);
  device_.cuda_.check(device_.cuda_.stream_wait_event(stream, event_, 0), "a stream was made to wait");
}

bool DeviceEvent::done() const {
  const Device::Scope scope(device_);
  return device_.cuda_.event_query(event_) != abi::kCudaNotReady;
}

void DeviceEvent::check() const {
  const Device::Scope scope(device_);
  const int state = device_.cuda_.event_query(event_);
  if (state != abi::kCudaNotReady) device_.cuda_.check(state, "a collective was under way");
}

DeviceMemory::~DeviceMemory() {
  try {
    give_back(stream_);
  } catch (const std::runtime_error&) {  // CUDA has ended with the process, and the memory with it
  }
}

void DeviceMemory::move_to(std::byte* target, abi::CuStream stream) {
  const Device::Scope scope(device_);
  device_.copy(std::array{DeviceCopy{target, data_, bytes_}}, stream);
  give_back(stream);
}

void DeviceMemory::give_back(abi::CuStream stream) {
  if (data_ == nullptr) return;
  const Device::Scope scope(device_);
  const abi::CuPointer address = address_of(std::exchange(data_, nullptr));
  device_.cuda_.check(device_.cuda_.memory_free(address, stream), "memory was given back");
}

Device& Device::get(int ordinal) {
  static std::mutex mutex;
  static auto* const devices = new std::map<int, Device*>;  // guarded by mutex
  std::lock_guard lock(mutex);
  Device*& device = (*devices)[ordinal];
  if (device == nullptr) device = new Device(ordinal);
  return *device;
}

Device::Device(int ordinal)
    : cuda_([]() -> const abi::Cuda& {
        Libraries& all = libraries();
        std::lock_guard lock(all.mutex);
        if (!all.cuda) throw std::runtime_error("CUDA's driver library has not been loaded");
        return *all.cuda;
      }()),
      ordinal_(ordinal) {
  abi::CuDevice device = 0;
  abi::CuUuid uuid{};
  char name[256] = "";
  cuda_.check(cuda_.device_get(&device, ordinal), "the device was looked up");
  cuda_.check(cuda_.device_get_name(name, sizeof name, device), "the device was asked for its name");
  cuda_.check(cuda_.device_get_uuid(&uuid, device), "the device was asked for its id");
  cuda_.check(cuda_.primary_context_retain(&context_, device), "the device's context was opened");
  name_ = name;
  uuid_.assign(uuid.bytes.begin(), uuid.bytes.end());
  const Scope scope(*this);
  int least = 0, greatest = 0;
  cuda_.check(cuda_.stream_priority_range(&least, &greatest), "the stream priorities were looked up");
  // Work that waits for other ranks must not also wait for this rank's kernels.
  cuda_.check(cuda_.stream_create(&stream_, abi::kCudaStreamNonBlocking, greatest), "a stream was made");
  abi::CuModule module = nullptr;
  if (cuda_.module_load(&module, kCopyKernelText) == abi::kCudaSuccess) {  // else the driver has no compiler
    cuda_.check(cuda_.module_function(&copy_kernel_, module, kCopyKernel), "the kernel that copies was looked up");
  }
  const abi::CuPoolOptions options{.location = device};
  size_t memory = 0;
  cuda_.check(cuda_.device_total_memory(&memory, device), "the device was asked for its memory");
  uint64_t kept = memory / kKeptPart;
  cuda_.check(cuda_.pool_create(&pool_, &options), "a pool of memory was made");
  cuda_.check(cuda_.pool_set(pool_, abi::kCudaPoolReleaseThreshold, &kept), "a pool of memory was made");
}

Device::Scope::Scope(Device& device) : cuda_(device.cuda_) {
  cuda_.check(cuda_.context_push(device.context_), "the device was selected");
  cuda_.exchange_capture_mode(&capture_mode_);
}

Device::Scope::~Scope() {
  abi::CuContext context = nullptr;
  cuda_.exchange_capture_mode(&capture_mode_);
  cuda_.context_pop(&context);
}

// An operation on a captured stream would end the capture with a CUDA error.
void Device::check_not_captured(abi::CuStream stream) const {
  int status = abi::kCudaCaptureNone;
  const int asked = cuda_.stream_is_capturing(stream, &status);
  if (asked == abi::kCudaStreamCaptureImplicit || (asked == abi::kCudaSuccess && status != abi::kCudaCaptureNone)) {
    throw std::invalid_argument(
        "a CUDA graph is being captured, and collectives cannot be part of one, because the ranks negotiate each call. "
        "Remedy: call the collective, and wait for it, outside of the capture.");
  }
  cuda_.check(asked, "a stream was checked for a capture");
}

std::shared_ptr<DeviceEvent> Device::record(abi::CuStream stream) {
  const Scope scope(*this);
  check_not_captured(stream);
  abi::CuEvent event = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!idle_events_.empty()) {
      event = idle_events_.back();
      idle_events_.pop_back();
    }
  }
  if (event == nullptr) cuda_.check(cuda_.event_create(&event, abi::kCudaEventDisableTiming), "an event was made");
  auto recorded = std::make_shared<DeviceEvent>(*this, event);
  cuda_.check(cuda_.event_record(event, stream), "an event was recorded");
  return recorded;
}

void Device::copy(std::span<const DeviceCopy> copies, abi::CuStream stream) {
  DeviceCopies pieces;
  unsigned count = 0;
  const auto launch = [&] {
    if (count == 0) return;
    if (count == 1 || copy_kernel_ == nullptr) {
      for (const DeviceCopy& each : std::span(pieces.data(), count)) {
        cuda_.check(cuda_.copy(address_of(each.target), address_of(each.source), each.bytes, stream),
                    "a tensor was copied");
      }
    } else {
      const auto longer = [](const DeviceCopy& a, const DeviceCopy& b) { return a.bytes < b.bytes; };
      const uint64_t longest = std::max_element(pieces.begin(), pieces.begin() + count, longer)->bytes;
      const auto blocks =
          static_cast<unsigned>(std::min<uint64_t>((longest + kBytesPerBlock - 1) / kBytesPerBlock, kMostCopyBlocks));
      void* parameters[] = {&pieces};
      cuda_.check(cuda_.launch(copy_kernel_, blocks, count, 1, kCopyThreads, 1, 1, 0, stream, parameters, nullptr),
                  "tensors were copied");
    }
    count = 0;
  };
  for (const DeviceCopy& copy : copies) {
    if (copy.bytes == 0 || copy.target == copy.source) continue;
    pieces[count++] = copy;
    if (count == pieces.size()) launch();
  }
  launch();
}

void Device::fill_identity(DType dtype, ReduceOp op, std::byte* target, size_t count) {
  if (count == 0) return;
  alignas(uint64_t) std::byte value[sizeof(uint64_t)] = {};
  horovodish::fill_identity(dtype, op, value, 1);
  const auto words = std::bit_cast<std::array<uint32_t, 2>>(value);
  const abi::CuPointer start = address_of(target);
  int result = abi::kCudaSuccess;
  switch (bytes_of(dtype)) {
    case 1:
      result = cuda_.fill_8(start, static_cast<unsigned char>(words[0]), count, stream_);
      break;
    case 2:
      result = cuda_.fill_16(start, static_cast<unsigned short>(words[0]), count, stream_);
      break;
    case 4:
      result = cuda_.fill_32(start, words[0], count, stream_);
      break;
    default:
      if (words[0] == words[1]) {
        result = cuda_.fill_32(start, words[0], 2 * count, stream_);
        break;
      }
      // Fills the two halves of each value, one after the other.
      result = cuda_.fill_2d_32(start, 8, words[0], 1, count, stream_);
      cuda_.check(result, "memory was filled");
      result = cuda_.fill_2d_32(start + 4, 8, words[1], 1, count, stream_);
  }
  cuda_.check(result, "memory was filled");
}

std::byte* Device::scratch(size_t bytes) {
  if (bytes <= scratch_bytes_) return scratch_;
  // Freed in the order of the stream, so that work that uses the old memory continues.
  if (scratch_ != nullptr) {
    scratch_bytes_ = 0;
    cuda_.check(cuda_.memory_free(address_of(std::exchange(scratch_, nullptr)), stream_), "memory was given back");
  }
  abi::CuPointer made = 0;
  cuda_.check(cuda_.memory_allocate(&made, bytes, pool_, stream_), "the fusion buffer was allocated");
  scratch_ = reinterpret_cast<std::byte*>(made);
  scratch_bytes_ = bytes;
  return scratch_;
}

std::unique_ptr<DeviceMemory> Device::allocate(size_t bytes, abi::CuStream stream) {
  abi::CuPointer made = 0;
  if (bytes > 0) cuda_.check(cuda_.memory_allocate(&made, bytes, pool_, stream), "memory was allocated");
  return std::make_unique<DeviceMemory>(*this, reinterpret_cast<std::byte*>(made), bytes, stream);
}

}  // namespace horovodish
