// The functions of CUDA's driver API that the engine calls, declared here and looked up in libcuda.so.1, which comes
// with the driver. Read from the reference of CUDA 13.0; all of them exist since CUDA 11.4. cuda.h maps the names
// without a version to these names with a version.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "abi/library.h"

namespace horovodish::abi {

using CuContext = void*;
using CuStream = uintptr_t;  // 0: the legacy default stream
using CuEvent = void*;
using CuPointer = unsigned long long;
using CuDevice = int;
using CuModule = void*;
using CuFunction = void*;
using CuPool = void*;

struct CuUuid {
  std::array<unsigned char, 16> bytes;
};

// CUmemPoolProps; what is 0 has its default.
struct CuPoolOptions {
  int allocation_type = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED, the only one
  int handle_types = 0;
  int location_type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
  int location = 0;       // the device
  std::array<uint64_t, 9> more{};
};

constexpr int kCudaSuccess = 0;
constexpr int kCudaOutOfMemory = 2;
constexpr int kCudaNotReady = 600;
constexpr int kCudaStreamCaptureImplicit = 906;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr int kCudaPoolReleaseThreshold = 4;  // of CUmemPool_attribute
constexpr int kCudaCaptureNone = 0;         // of CUstreamCaptureStatus
constexpr int kCudaCaptureModeRelaxed = 2;  // of CUstreamCaptureMode

// The constructor throws std::runtime_error with the reason if it cannot open the library.
struct Cuda : Library {
  explicit Cuda(const std::string& path) : Library(path) { check(init(0), "it was initialized"); }

  int (*init)(unsigned flags) = look_up("cuInit");
  int (*get_error_name)(int error, const char** name) = look_up("cuGetErrorName");
  int (*get_error_string)(int error, const char** text) = look_up("cuGetErrorString");
  int (*device_get)(CuDevice* device, int ordinal) = look_up("cuDeviceGet");
  int (*device_get_name)(char* name, int length, CuDevice device) = look_up("cuDeviceGetName");
  int (*device_get_uuid)(CuUuid* uuid, CuDevice device) =
      look_up("cuDeviceGetUuid_v2");  // tells the parts of a divided GPU (MIG) apart
  int (*device_total_memory)(size_t* bytes, CuDevice device) = look_up("cuDeviceTotalMem_v2");
  int (*primary_context_retain)(CuContext* context, CuDevice device) = look_up("cuDevicePrimaryCtxRetain");
  int (*context_push)(CuContext context) = look_up("cuCtxPushCurrent_v2");
  int (*context_pop)(CuContext* context) = look_up("cuCtxPopCurrent_v2");
  int (*stream_priority_range)(int* least, int* greatest) = look_up("cuCtxGetStreamPriorityRange");
  int (*stream_create)(CuStream* stream, unsigned flags, int priority) = look_up("cuStreamCreateWithPriority");
  int (*stream_wait_event)(CuStream stream, CuEvent event, unsigned flags) = look_up("cuStreamWaitEvent");
  int (*stream_is_capturing)(CuStream stream, int* status) = look_up("cuStreamIsCapturing");
  int (*exchange_capture_mode)(int* mode) = look_up("cuThreadExchangeStreamCaptureMode");
  int (*event_create)(CuEvent* event, unsigned flags) = look_up("cuEventCreate");
  int (*event_record)(CuEvent event, CuStream stream) = look_up("cuEventRecord");
  int (*event_query)(CuEvent event) = look_up("cuEventQuery");
  int (*pool_create)(CuPool* pool, const CuPoolOptions* options) = look_up("cuMemPoolCreate");
  int (*pool_set)(CuPool pool, int attribute, void* value) = look_up("cuMemPoolSetAttribute");
  int (*memory_allocate)(CuPointer* pointer, size_t bytes, CuPool pool,
                         CuStream stream) = look_up("cuMemAllocFromPoolAsync");
  int (*memory_free)(CuPointer pointer, CuStream stream) = look_up("cuMemFreeAsync");
  int (*copy)(CuPointer target, CuPointer source, size_t bytes, CuStream stream) = look_up("cuMemcpyDtoDAsync_v2");
  int (*module_load)(CuModule* module, const void* image) = look_up("cuModuleLoadData");
  int (*module_function)(CuFunction* function, CuModule module, const char* name) = look_up("cuModuleGetFunction");
  int (*launch)(CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                unsigned block_y, unsigned block_z, unsigned shared_bytes, CuStream stream, void** parameters,
                void** extra) = look_up("cuLaunchKernel");
  int (*fill_8)(CuPointer target, unsigned char value, size_t count, CuStream stream) = look_up("cuMemsetD8Async");
  int (*fill_16)(CuPointer target, unsigned short value, size_t count, CuStream stream) = look_up("cuMemsetD16Async");
  int (*fill_32)(CuPointer target, unsigned value, size_t count, CuStream stream) = look_up("cuMemsetD32Async");
  // `height` rows of `width` values, `pitch` bytes apart.
  int (*fill_2d_32)(CuPointer target, size_t pitch, unsigned value, size_t width, size_t height,
                    CuStream stream) = look_up("cuMemsetD2D32Async");

  // Throws std::runtime_error with CUDA's name and text of the error. `what` completes "CUDA failed while ...".
  void check(int result, const char* what) const {
    if (result == kCudaSuccess) return;
    const char *name = nullptr, *text = nullptr;
    get_error_name(result, &name);
    get_error_string(result, &text);
    const char* const remedy =
        result == kCudaOutOfMemory
            ? ". Remedy: leave the engine some of the GPU's memory: by a smaller batch, by the framework's own limit "
              "(XLA_PYTHON_CLIENT_MEM_FRACTION, torch.cuda.set_per_process_memory_fraction), or by a smaller "
              "HOROVODISH_FUSION_THRESHOLD_MB."
            : "";
    throw std::runtime_error(std::string("CUDA failed while ") + what + ": " +
                             (name == nullptr ? "error " + std::to_string(result) : name) +
                             (text == nullptr ? "" : std::string(", ") + text) + remedy);
  }
};

}  // namespace horovodish::abi
