#include "planes/nccl/nccl_communicator.h"

#include <array>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

#include "arithmetic/reduce.h"
#include "memory/thread_setup.h"

namespace horovodish {

namespace {
constexpr std::chrono::milliseconds kNap{1};
}  // namespace

abi::NcclType nccl_type(DType dtype) {
  using Type = abi::NcclType;
  constexpr auto kNone = static_cast<Type>(-1);
  constexpr std::array<Type, kDTypeNames.size()> kTypes{
      // in the order of DType
      kNone,          Type::uint8,   Type::int8,    kNone, Type::int32, Type::int64, Type::float16,
      Type::bfloat16, Type::float32, Type::float64, kNone, kNone,       kNone};
  const Type type = kTypes[static_cast<size_t>(dtype)];
  if (type == kNone) throw std::logic_error("NCCL has no " + std::string(name_of(dtype)));
  return type;
}

NcclCommunicator::NcclCommunicator(const abi::Nccl& nccl, Device& device, const abi::NcclUniqueId& id, int ranks,
                                   int rank)
    : nccl_(nccl), device_(device) {
  abi::NcclConfig config;
  config.blocking = 0;
  const NewThreadsAnywhere cores;
  check(nccl_.comm_init_rank_config(&communicator_, ranks, id, rank, &config), "connecting the ranks");
}

bool NcclCommunicator::end(std::chrono::milliseconds limit) {
  if (communicator_ == nullptr) return true;
  std::promise<bool> promise;
  auto ended = promise.get_future();
  std::thread([&device = device_, communicator = std::exchange(communicator_, nullptr),
               last_call = finalized_ ? nccl_.comm_destroy : nccl_.comm_abort, promise = std::move(promise)]() mutable {
    set_up_thread("hvd-nccl-end");
    try {
      const Device::Scope scope(device);
      const abi::NcclResult result = last_call(communicator);
      promise.set_value(result == abi::NcclResult::success || result == abi::NcclResult::in_progress);
    } catch (const std::exception&) {  // CUDA has ended with the process
      promise.set_value(false);
    }
  }).detach();
  return ended.wait_for(limit) == std::future_status::ready && ended.get();
}

bool NcclCommunicator::ready() {
  abi::NcclResult state = abi::NcclResult::success;
  check(nccl_.comm_get_async_error(communicator_, &state), "asking for errors");
  check(state, connected_ ? "a collective was under way" : "connecting the ranks");
  connected_ |= state == abi::NcclResult::success;
  return state == abi::NcclResult::success;
}

void NcclCommunicator::finalize(std::chrono::milliseconds limit) noexcept {
  abi::NcclResult state = abi::NcclResult::in_progress;
  // NCCL refuses to finalize a communicator that is still being made or has failed.
  if (nccl_.comm_get_async_error(communicator_, &state) != abi::NcclResult::success) return;
  if (state != abi::NcclResult::success) return;
  state = nccl_.comm_finalize(communicator_);
  for (auto left = limit; state == abi::NcclResult::in_progress && left.count() > 0; left -= kNap) {
    std::this_thread::sleep_for(kNap);
    if (nccl_.comm_get_async_error(communicator_, &state) != abi::NcclResult::success) return;
  }
  finalized_ = state == abi::NcclResult::success;
}

void NcclCommunicator::check(abi::NcclResult result, const char* what) const {
  if (result == abi::NcclResult::success || result == abi::NcclResult::in_progress) return;
  const char* const last = nccl_.get_last_error(communicator_);
  std::string text = std::string("NCCL failed while ") + what + ": " + nccl_.get_error_string(result);
  if (last != nullptr && *last != '\0') text += " (" + std::string(last) + ")";
  throw std::runtime_error(
      text + " on GPU " + std::to_string(device_.ordinal()) +
      ". Remedy: run the job again with NCCL_DEBUG=WARN or INFO in the environment of the ranks; NCCL then "
      "logs more.");
}

abi::NcclOp NcclCommunicator::sum_of_multiples(DType dtype, double factor) {
  const float one = 1;
  alignas(double) std::byte scalar[sizeof(double)];
  store_floats(dtype, &one, scalar, 1, factor);
  abi::NcclOp op{};
  check(nccl_.red_op_create_pre_mul_sum(&op, scalar, nccl_type(dtype), abi::kNcclScalarHostImmediate, communicator_),
        "making a scaled sum");
  factors_.push_back(op);
  return op;
}

void NcclCommunicator::forget_factors() {
  for (const abi::NcclOp op : factors_) nccl_.red_op_destroy(op, communicator_);
  factors_.clear();
}

}  // namespace horovodish
