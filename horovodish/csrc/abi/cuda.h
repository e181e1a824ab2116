// The functions of CUDA's driver API that the engine calls, declared by us and looked up in libcuda.so.1, which comes
// with the driver. Read from the reference of CUDA 13.0; all of them are there since CUDA 11.4. Names with a version
// are what cuda.h makes of those without.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace horovodish::abi {

using CuContext = void*;
using CuStream = void*;  // null: the legacy default stream
using CuEvent = void*;
using CuPointer = unsigned long long;
using CuDevice = int;

struct CuUuid {
  std::array<unsigned char, 16> bytes;
};

constexpr int kCudaSuccess = 0;
constexpr int kCudaOutOfMemory = 2;
constexpr int kCudaNotReady = 600;
constexpr int kCudaStreamCaptureImplicit = 906;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr int kCudaCaptureNone = 0;         // of CUstreamCaptureStatus
constexpr int kCudaCaptureModeRelaxed = 2;  // of CUstreamCaptureMode

struct Cuda {
  std::string path;

  int (*init)(unsigned flags) = nullptr;
  int (*get_error_name)(int error, const char** name) = nullptr;
  int (*get_error_string)(int error, const char** text) = nullptr;
  int (*device_get)(CuDevice* device, int ordinal) = nullptr;
  int (*device_get_name)(char* name, int length, CuDevice device) = nullptr;
  int (*device_get_uuid)(CuUuid* uuid, CuDevice device) = nullptr;
  int (*primary_context_retain)(CuContext* context, CuDevice device) = nullptr;
  int (*context_push)(CuContext context) = nullptr;
  int (*context_pop)(CuContext* context) = nullptr;
  int (*stream_priority_range)(int* least, int* greatest) = nullptr;
  int (*stream_create)(CuStream* stream, unsigned flags, int priority) = nullptr;
  int (*stream_wait_event)(CuStream stream, CuEvent event, unsigned flags) = nullptr;
  int (*stream_is_capturing)(CuStream stream, int* status) = nullptr;
  int (*exchange_capture_mode)(int* mode) = nullptr;
  int (*event_create)(CuEvent* event, unsigned flags) = nullptr;
  int (*event_record)(CuEvent event, CuStream stream) = nullptr;
  int (*event_query)(CuEvent event) = nullptr;
  int (*memory_allocate)(CuPointer* pointer, size_t bytes, CuStream stream) = nullptr;
  int (*memory_free)(CuPointer pointer, CuStream stream) = nullptr;
  int (*copy)(CuPointer target, CuPointer source, size_t bytes, CuStream stream) = nullptr;
  int (*fill_8)(CuPointer target, unsigned char value, size_t count, CuStream stream) = nullptr;
  int (*fill_16)(CuPointer target, unsigned short value, size_t count, CuStream stream) = nullptr;
  int (*fill_32)(CuPointer target, unsigned value, size_t count, CuStream stream) = nullptr;
  // `height` rows of `width` values, `pitch` bytes apart.
  int (*fill_2d_32)(CuPointer target, size_t pitch, unsigned value, size_t width, size_t height,
                    CuStream stream) = nullptr;

  // Opens the library, fills in the rest and initializes the driver; throws std::runtime_error saying what is wrong.
  void load(const std::string& library);
  // Throws std::runtime_error with CUDA's name and text of the error. `what` completes "CUDA failed while ...".
  void check(int result, const char* what) const;
};

}  // namespace horovodish::abi
