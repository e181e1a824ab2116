#include "abi/cuda.h"

#include "abi/library.h"

namespace horovodish::abi {

void Cuda::load(const std::string& library) {
  path = library;
  void* opened = open_library(path);
  look_up(opened, path, "cuInit", init);
  look_up(opened, path, "cuGetErrorName", get_error_name);
  look_up(opened, path, "cuGetErrorString", get_error_string);
  look_up(opened, path, "cuDeviceGet", device_get);
  look_up(opened, path, "cuDeviceGetName", device_get_name);
  look_up(opened, path, "cuDeviceGetUuid_v2", device_get_uuid);  // tells the parts of a divided GPU (MIG) apart
  look_up(opened, path, "cuDevicePrimaryCtxRetain", primary_context_retain);
  look_up(opened, path, "cuCtxPushCurrent_v2", context_push);
  look_up(opened, path, "cuCtxPopCurrent_v2", context_pop);
  look_up(opened, path, "cuCtxGetStreamPriorityRange", stream_priority_range);
  look_up(opened, path, "cuStreamCreateWithPriority", stream_create);
  look_up(opened, path, "cuStreamWaitEvent", stream_wait_event);
  look_up(opened, path, "cuStreamIsCapturing", stream_is_capturing);
  look_up(opened, path, "cuThreadExchangeStreamCaptureMode", exchange_capture_mode);
  look_up(opened, path, "cuEventCreate", event_create);
  look_up(opened, path, "cuEventRecord", event_record);
  look_up(opened, path, "cuEventQuery", event_query);
  look_up(opened, path, "cuMemAllocAsync", memory_allocate);
  look_up(opened, path, "cuMemFreeAsync", memory_free);
  look_up(opened, path, "cuMemcpyDtoDAsync_v2", copy);
  look_up(opened, path, "cuMemsetD8Async", fill_8);
  look_up(opened, path, "cuMemsetD16Async", fill_16);
  look_up(opened, path, "cuMemsetD32Async", fill_32);
  look_up(opened, path, "cuMemsetD2D32Async", fill_2d_32);
  check(init(0), "it was initialized");
}

void Cuda::check(int result, const char* what) const {
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

}  // namespace horovodish::abi
