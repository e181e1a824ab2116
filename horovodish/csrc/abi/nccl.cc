#include "abi/nccl.h"

#include "abi/library.h"

namespace horovodish::abi {

void Nccl::load(const std::string& library) {
  path = library;
  void* opened = open_library(path);
  look_up(opened, path, "ncclGetVersion", get_version);
  if (get_version(&version) != NcclResult::success) throw std::runtime_error("ncclGetVersion failed");
  // Before the other functions, some of which an old one does not have.
  if (version < kOldest) throw std::runtime_error("this NCCL is too old: " + std::to_string(version));
  look_up(opened, path, "ncclGetErrorString", get_error_string);
  look_up(opened, path, "ncclGetLastError", get_last_error);
  look_up(opened, path, "ncclGetUniqueId", get_unique_id);
  look_up(opened, path, "ncclCommInitRankConfig", comm_init_rank_config);
  look_up(opened, path, "ncclCommGetAsyncError", comm_get_async_error);
  look_up(opened, path, "ncclCommFinalize", comm_finalize);
  look_up(opened, path, "ncclCommDestroy", comm_destroy);
  look_up(opened, path, "ncclCommAbort", comm_abort);
  look_up(opened, path, "ncclRedOpCreatePreMulSum", red_op_create_pre_mul_sum);
  look_up(opened, path, "ncclRedOpDestroy", red_op_destroy);
  look_up(opened, path, "ncclGroupStart", group_start);
  look_up(opened, path, "ncclGroupEnd", group_end);
  look_up(opened, path, "ncclAllReduce", all_reduce);
  look_up(opened, path, "ncclReduce", reduce);
  look_up(opened, path, "ncclReduceScatter", reduce_scatter);
  look_up(opened, path, "ncclBroadcast", broadcast);
  look_up(opened, path, "ncclAllGather", all_gather);
  look_up(opened, path, "ncclSend", send);
  look_up(opened, path, "ncclRecv", receive);
}

}  // namespace horovodish::abi
