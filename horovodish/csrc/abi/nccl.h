// The functions of NCCL that the engine calls, declared here and looked up in the libnccl.so.2 that is found at run
// time. Read from nccl.h of NCCL 2.32; these declarations have been the same since 2.18.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "abi/library.h"

namespace horovodish::abi {

using NcclCommunicator = void*;
using NcclStream = uintptr_t;  // a CUstream, as is the runtime API's cudaStream_t

// The other values are errors, for which NCCL has texts.
enum class NcclResult : int { success = 0, in_progress = 7 };

enum class NcclType : int {
  int8 = 0,
  uint8 = 1,
  int32 = 2,
  int64 = 4,
  float16 = 6,
  float32 = 7,
  float64 = 8,
  bfloat16 = 9,
};

// ncclRedOpCreatePreMulSum makes further values.
enum class NcclOp : int { sum = 0, product = 1, max = 2, min = 3, average = 4 };

inline constexpr int kNcclScalarHostImmediate = 1;  // of ncclScalarResidence_t

struct NcclUniqueId {
  char bytes[128];
};

// The fields of ncclConfig_t up to NCCL 2.18, and the field that a later NCCL has put into the padding. NCCL reads
// `size` bytes and takes its defaults for other fields.
struct NcclConfig {
  static constexpr int kUndefined = INT_MIN;

  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
};

// The constructor throws std::runtime_error with the reason if it cannot open the library.
struct Nccl : Library {
  explicit Nccl(const std::string& path) : Library(path) {}

  // The first version with all functions used here and with non-blocking communicators that can be aborted while they
  // are made.
  static constexpr int kOldest = 21800;

  NcclResult (*get_version)(int* version) = look_up("ncclGetVersion");
  // Asked before the other functions are looked up: an old NCCL lacks some of them. 21805 is 2.18.5.
  const int version = checked_version();
  const char* (*get_error_string)(NcclResult result) = look_up("ncclGetErrorString");
  const char* (*get_last_error)(NcclCommunicator communicator) = look_up("ncclGetLastError");
  NcclResult (*get_unique_id)(NcclUniqueId* id) = look_up("ncclGetUniqueId");
  NcclResult (*comm_init_rank_config)(NcclCommunicator* communicator, int ranks, NcclUniqueId id, int rank,
                                      NcclConfig* config) = look_up("ncclCommInitRankConfig");
  NcclResult (*comm_get_async_error)(NcclCommunicator communicator,
                                     NcclResult* state) = look_up("ncclCommGetAsyncError");
  NcclResult (*comm_finalize)(NcclCommunicator communicator) = look_up("ncclCommFinalize");
  NcclResult (*comm_destroy)(NcclCommunicator communicator) = look_up("ncclCommDestroy");
  NcclResult (*comm_abort)(NcclCommunicator communicator) = look_up("ncclCommAbort");
  NcclResult (*red_op_create_pre_mul_sum)(NcclOp* op, void* scalar, NcclType type, int residence,
                                          NcclCommunicator communicator) = look_up("ncclRedOpCreatePreMulSum");
  NcclResult (*red_op_destroy)(NcclOp op, NcclCommunicator communicator) = look_up("ncclRedOpDestroy");
  NcclResult (*group_start)() = look_up("ncclGroupStart");
  NcclResult (*group_end)() = look_up("ncclGroupEnd");
  NcclResult (*all_reduce)(const void* source, void* target, size_t count, NcclType type, NcclOp op,
                           NcclCommunicator communicator, NcclStream stream) = look_up("ncclAllReduce");
  NcclResult (*reduce)(const void* source, void* target, size_t count, NcclType type, NcclOp op, int root,
                       NcclCommunicator communicator, NcclStream stream) = look_up("ncclReduce");
  NcclResult (*reduce_scatter)(const void* source, void* target, size_t target_count, NcclType type, NcclOp op,
                               NcclCommunicator communicator, NcclStream stream) = look_up("ncclReduceScatter");
  NcclResult (*broadcast)(const void* source, void* target, size_t count, NcclType type, int root,
                          NcclCommunicator communicator, NcclStream stream) = look_up("ncclBroadcast");
  NcclResult (*all_gather)(const void* source, void* target, size_t source_count, NcclType type,
                           NcclCommunicator communicator, NcclStream stream) = look_up("ncclAllGather");
  NcclResult (*send)(const void* source, size_t count, NcclType type, int peer, NcclCommunicator communicator,
                     NcclStream stream) = look_up("ncclSend");
  NcclResult (*receive)(void* target, size_t count, NcclType type, int peer, NcclCommunicator communicator,
                        NcclStream stream) = look_up("ncclRecv");

 private:
  int checked_version() const {
    int found = 0;
    if (get_version(&found) != NcclResult::success) throw std::runtime_error("ncclGetVersion failed");
    if (found < kOldest) throw std::runtime_error("this NCCL is too old: " + std::to_string(found));
    return found;
  }
};

}  // namespace horovodish::abi
