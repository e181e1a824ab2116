// The part of XLA's foreign function interface that our handlers use. Layouts and values were read from
// xla/ffi/api/c_api.h of jaxlib 0.10.2, version 0.3 of the interface; a test compares them with that header.
//
// Structs only grow at their ends and contain their size, so each handler checks `struct_size` for the fields that it
// reads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace horovodish::abi::xla {

inline constexpr int kMajorVersion = 0;
inline constexpr int kEarlyMinorVersion = 1;

enum ExtensionType : int { kMetadataExtension = 1 };

struct Extension {
  size_t struct_size;
  ExtensionType type;
  Extension* next;
};

struct ApiVersion {
  size_t struct_size;
  Extension* extensions;
  int major_version;
  int minor_version;
};

// The runtime's question when a handler is registered.
struct Metadata {
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum ErrorCode : int {
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kInternal = 13,
  kUnavailable = 14,
};

struct Error;   // the runtime's
struct Future;  // the runtime's

struct ErrorCreateArgs {
  size_t struct_size;
  Extension* extensions;
  const char* message;
  ErrorCode code;
};

struct FutureCreateArgs {
  size_t struct_size;
  Extension* extensions;
  Future* future;
};

struct FutureSetAvailableArgs {
  size_t struct_size;
  Extension* extensions;
  Future* future;
};

struct FutureSetErrorArgs {
  size_t struct_size;
  Extension* extensions;
  Future* future;
  Error* error;  // passes to the runtime
};

struct ExecutionContext;  // the runtime's

struct StreamGetArgs {
  size_t struct_size;
  Extension* extensions;
  ExecutionContext* context;
  void* stream;  // out
};

// Tells executions of programs apart.
struct RunIdGetArgs {
  size_t struct_size;
  Extension* extensions;
  ExecutionContext* context;
  int64_t run_id;  // out
};

struct DeviceOrdinalGetArgs {
  size_t struct_size;
  Extension* extensions;
  ExecutionContext* context;
  int32_t ordinal;  // out
};

enum DataType : int {
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kBF16 = 16,
};

struct Buffer {
  size_t struct_size;
  Extension* extensions;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

enum AttributeType : int { kScalarAttribute = 3, kStringAttribute = 4 };

struct ByteSpan {  // also a string attribute
  const char* data;
  size_t size;
};

struct Scalar {
  DataType dtype;
  void* value;
};

// Arguments of a call, and its results.
struct Buffers {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  int* types;  // 1: a buffer
  void** buffers;
};

struct Attributes {
  size_t struct_size;
  Extension* extensions;
  int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** values;
};

inline constexpr int kBufferType = 1;

struct CallFrame;
using Handler = Error*(CallFrame*);

// Execution is the last stage of a call. The handlers of other stages may be null.
struct HandlerBundle {
  Handler* instantiate;
  Handler* prepare;
  Handler* initialize;
  Handler* execute;
};

struct HandlerRegisterArgs {
  size_t struct_size;
  Extension* extensions;
  ByteSpan name;
  ByteSpan platform;
  HandlerBundle bundle;
  uint32_t traits;
};

struct Api {
  size_t struct_size;
  Extension* extensions;
  ApiVersion api_version;
  const void* internal_api;
  Error* (*error_create)(ErrorCreateArgs*);
  void* unused[2];
  Error* (*handler_register)(HandlerRegisterArgs*);
  Error* (*stream_get)(StreamGetArgs*);
  void* unused_too[8];
  Error* (*future_create)(FutureCreateArgs*);
  Error* (*future_set_available)(FutureSetAvailableArgs*);
  Error* (*future_set_error)(FutureSetErrorArgs*);
  Error* (*run_id_get)(RunIdGetArgs*);
  Error* (*device_ordinal_get)(DeviceOrdinalGetArgs*);
};

enum Stage : int { kExecute = 3 };

struct CallFrame {
  size_t struct_size;
  Extension* extensions;
  const Api* api;
  ExecutionContext* context;
  Stage stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
  Future* future;  // out: the call goes on after the handler has returned, until this is set
};

}  // namespace horovodish::abi::xla
