#include "xla_ops.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "frontend.h"
#include "staging.h"

namespace horovodish {

namespace {

namespace xla = abi::xla;

constexpr std::chrono::milliseconds kDriveLimit{1};

struct Failure {
  xla::ErrorCode code = xla::kInternal;
  std::string message;  // empty: there is none
};

// Memory of a result, ours or the runtime's.
struct Target {
  std::byte* data;
  size_t bytes;
};

// A `done` that waits.
struct Waiter {
  const xla::Api* api;
  xla::Future* future;
  std::vector<Target> wanted;
};

struct Group;

// One operation, from its `start` until its `done` has taken the result.
struct Call {
  Call() = default;
  Call(const Call&) = delete;
  ~Call();

  std::string what;                // for messages
  std::shared_ptr<Handle> handle;  // null if the operation was not handed to the engine
  StagingPool::Block memory;
  std::vector<Target> results;  // within `memory`; none where the engine allocates them

  // Guarded by Calls::mutex_.
  bool settled = false;
  Failure failure;  // known once it is settled
  std::shared_ptr<Group> group;  // null before the first `done` of the group
  std::optional<Waiter> waiter;
};

// The operations that belong together. Where one fails, no `done` waits for the others: they may never end, as when a rank
// has a larger tree than the others.
struct Group {
  Failure failure;
  std::vector<std::shared_ptr<Call>> waiting;
};

StagingPool& pool() {
  static auto* const pool = new StagingPool;  // XLA's threads may use it until the process has ended
  return *pool;
}

Call::~Call() {
  if (handle && handle->memory_abandoned()) {
    memory.abandon();
  } else {
    pool().give_back(std::move(memory));
  }
}

// Whether an operation has succeeded, which its completion thread may not have said yet.
bool has_result(const Call& call) { return call.handle && call.handle->settled() && call.handle->error() == nullptr; }

// All that the program hands over has been handed over, so for a moment this thread has nothing better to do than to drive the
// engine: a small operation then ends without a change of threads. No longer, because blocked threads of XLA make deadlocks.
void drive(const Call& call) {
  if (!call.handle || call.handle->settled()) return;
  try {
    running_engine()->wait(*call.handle, kDriveLimit);
  } catch (const EngineStopped&) {  // then the operation has failed
  }
}

// Copies the results of an operation that has not failed to where the runtime wants them.
Failure collect(const Call& call, const std::vector<Target>& wanted) {
  const bool allocated = call.results.empty();
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Handle::Output* output = allocated ? &call.handle->outputs.at(i) : nullptr;
    const Target got = allocated ? Target{output->data.get(), output->bytes} : call.results.at(i);
    if (got.bytes != wanted[i].bytes) {
      return {xla::kInvalidArgument,
              call.what + ": the ranks gave " + std::to_string(got.bytes) +
                  " bytes, but the program was compiled for " + std::to_string(wanted[i].bytes) +
                  ", as many from every rank. Remedy: gather rows that differ by rank outside of jit."};
    }
    if (got.bytes > 0) std::memcpy(wanted[i].data, got.data, got.bytes);
  }
  return {};
}

xla::Error* error_of(const xla::Api& api, const Failure& failure) {
  xla::ErrorCreateArgs args{sizeof(args), nullptr, failure.message.c_str(), failure.code};
  return api.error_create(&args);
}

// Runs what follows in the program.
void fulfil(const Waiter& waiter, const Failure& failure) {
  if (failure.message.empty()) {
    xla::FutureSetAvailableArgs args{sizeof(args), nullptr, waiter.future};
    waiter.api->future_set_available(&args);
  } else {
    xla::FutureSetErrorArgs args{sizeof(args), nullptr, waiter.future, error_of(*waiter.api, failure)};
    waiter.api->future_set_error(&args);
  }
}

class Calls {
 public:
  int32_t add(std::shared_ptr<Call> call) {
    std::lock_guard lock(mutex_);
    while (calls_.contains(++last_)) {
    }
    calls_.emplace(last_, std::move(call));
    return last_;
  }

  void settle(const std::shared_ptr<Call>& call, Failure failure) {
    std::vector<std::shared_ptr<Call>> released;
    {
      std::lock_guard lock(mutex_);
      call->settled = true;
      call->failure = failure;
      if (!call->group) return;
      auto& waiting = call->group->waiting;
      if (!failure.message.empty()) {
        call->group->failure = failure;
        released.swap(waiting);
      } else if (const auto own = std::find(waiting.begin(), waiting.end(), call); own != waiting.end()) {
        released.push_back(call);
        waiting.erase(own);
      }
    }
    for (const auto& waits : released) {
      const Waiter waiter = std::move(*waits->waiter);
      fulfil(waiter, failure.message.empty() ? collect(*waits, waiter.wanted) : failure);
    }
  }

  // The `done` of an operation: either it has the result, or `waits` is asked for a future.
  template <class Waits>
  Failure finish(const int32_t* numbers, size_t count, size_t index, std::vector<Target> wanted, Waits&& waits) {
    std::shared_ptr<Call> call;
    {
      std::lock_guard lock(mutex_);
      const auto found = calls_.find(numbers[index]);
      if (found == calls_.end()) throw std::runtime_error("the result of an operation was asked for twice");
      call = found->second;
      if (!call->group) form_group(numbers, count);
      calls_.erase(found);
    }
    drive(*call);
    {
      std::lock_guard lock(mutex_);
      if (!call->group->failure.message.empty()) return call->group->failure;
      if (!call->settled && !has_result(*call)) {
        call->waiter = waits(std::move(wanted));
        call->group->waiting.push_back(call);
        return {};
      }
    }
    return collect(*call, wanted);
  }

 private:
  void form_group(const int32_t* numbers, size_t count) {
    const auto group = std::make_shared<Group>();
    for (size_t i = 0; i < count; ++i) {
      const auto found = calls_.find(numbers[i]);
      if (found == calls_.end()) continue;
      found->second->group = group;
      if (!found->second->failure.message.empty()) group->failure = found->second->failure;
    }
  }

  std::mutex mutex_;
  int32_t last_ = 0;  // guarded by mutex_
  std::unordered_map<int32_t, std::shared_ptr<Call>> calls_;  // guarded by mutex_
};

Calls& calls() {
  static auto* const calls = new Calls;
  return *calls;
}

// -- what the runtime gives

class Arguments {
 public:
  explicit Arguments(const xla::Attributes& attributes) : attributes_(attributes) {}

  std::string_view text(std::string_view name) const {
    const auto* span = static_cast<const xla::ByteSpan*>(value(name, xla::kStringAttribute));
    return {span->data, span->size};
  }
  int64_t number(std::string_view name) const { return *static_cast<const int64_t*>(scalar(name, xla::kS64)); }
  double real(std::string_view name) const { return *static_cast<const double*>(scalar(name, xla::kF64)); }

 private:
  const void* scalar(std::string_view name, xla::DataType type) const {
    const auto* scalar = static_cast<const xla::Scalar*>(value(name, xla::kScalarAttribute));
    if (scalar->dtype != type) throw std::runtime_error("attribute " + std::string(name) + " is of another type");
    return scalar->value;
  }
  const void* value(std::string_view name, xla::AttributeType type) const {
    for (int64_t i = 0; i < attributes_.size; ++i) {
      if (std::string_view(attributes_.names[i]->data, attributes_.names[i]->size) != name) continue;
      if (attributes_.types[i] != type) break;
      return attributes_.values[i];
    }
    throw std::runtime_error("a call without attribute " + std::string(name));
  }

  const xla::Attributes& attributes_;
};

const xla::Buffer& buffer_at(const xla::Buffers& buffers, int64_t index) {
  if (index >= buffers.size || buffers.types[index] != xla::kBufferType) throw std::runtime_error("a missing buffer");
  return *static_cast<const xla::Buffer*>(buffers.buffers[index]);
}

DType dtype_of(const xla::Buffer& buffer) {
  switch (buffer.dtype) {
    case xla::kPred:
      return DType::boolean;
    case xla::kU8:
      return DType::uint8;
    case xla::kS8:
      return DType::int8;
    case xla::kS16:
      return DType::int16;
    case xla::kS32:
      return DType::int32;
    case xla::kS64:
      return DType::int64;
    case xla::kF16:
      return DType::float16;
    case xla::kBF16:
      return DType::bfloat16;
    case xla::kF32:
      return DType::float32;
    case xla::kF64:
      return DType::float64;
  }
  throw std::runtime_error("a dtype that the engine does not know");
}

size_t bytes_in(const xla::Buffer& buffer) {
  size_t bytes = bytes_of(dtype_of(buffer));
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= static_cast<size_t>(buffer.dims[i]);
  return bytes;
}

// The runtime asks once, at registration, which version of the interface a handler speaks.
bool answers_metadata(xla::CallFrame& frame) {
  if (frame.extensions == nullptr || frame.extensions->type != xla::kMetadataExtension) return false;
  auto& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.extensions)->metadata;
  metadata.api_version = {sizeof(xla::ApiVersion), nullptr, frame.api->api_version.major_version,
                          frame.api->api_version.minor_version};
  return true;
}

void check_interface(const xla::CallFrame& frame) {
  const bool fits = frame.api->api_version.major_version == xla::kMajorVersion &&
                    frame.api->struct_size >= sizeof(xla::Api) && frame.struct_size >= offsetof(xla::CallFrame, future);
  if (!fits) {
    throw std::runtime_error(
        "this jaxlib speaks another version of XLA's foreign function interface than horovodish. Remedy: use jaxlib "
        "0.8 "
        "or later, and tell us of a version that does not work.");
  }
}

// -- from arguments to an operation

std::vector<std::string_view> lines(std::string_view text) {
  std::vector<std::string_view> found;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    found.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  return found;
}

std::shared_ptr<Request> request_of(const xla::CallFrame& frame, const Arguments& given) {
  auto request = std::make_shared<Request>();
  request->kind = static_cast<Kind>(given.number("kind"));
  request->name = given.text("name");
  request->op = static_cast<ReduceOp>(given.number("op"));
  request->prescale = given.real("prescale");
  request->postscale = given.real("postscale");
  request->root = static_cast<int>(given.number("root"));
  const auto names = lines(given.text("members"));
  for (size_t i = 0; i < names.size(); ++i) {
    const xla::Buffer& buffer = buffer_at(frame.arguments, static_cast<int64_t>(i));
    Member member{std::string(names[i]), dtype_of(buffer), {buffer.dims, buffer.dims + buffer.rank}};
    request->members.push_back(std::move(member));
  }
  return request;
}

void check_place(const Engine& engine, const Arguments& given) {
  if (given.number("rank") == engine.rank() && given.number("size") == engine.size()) return;
  throw std::runtime_error("the program was compiled on rank " + std::to_string(given.number("rank")) + " of " +
                           std::to_string(given.number("size")) + ", and this is rank " +
                           std::to_string(engine.rank()) + " of " + std::to_string(engine.size()) +
                           ". Remedy: call jax.clear_caches() after init().");
}

// Copies the arguments into the call's memory and says where they are and where the results go.
std::vector<Buffer> stage(const xla::CallFrame& frame, const Arguments& given, Request& request, Call& call) {
  const auto aligned = [](size_t bytes) {
    return (bytes + StagingPool::kAlignment - 1) / StagingPool::kAlignment * StagingPool::kAlignment;
  };
  const bool engine_allocates = request.kind == Kind::allgather || request.kind == Kind::alltoall;
  const bool in_place =
      request.kind == Kind::allreduce || request.kind == Kind::broadcast || request.kind == Kind::barrier;
  const auto ranks = static_cast<size_t>(given.number("set_size")),
             index = static_cast<size_t>(given.number("set_rank"));
  std::vector<size_t> sizes;
  size_t total = 0;
  for (size_t i = 0; i < request.members.size(); ++i) {
    sizes.push_back(bytes_in(buffer_at(frame.arguments, static_cast<int64_t>(i))));
    total += aligned(sizes.back()) * (request.kind == Kind::reducescatter ? 2 : 1);
  }
  call.memory = pool().take(total + StagingPool::kAlignment);
  std::byte* next = call.memory.data();
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < request.members.size(); ++i) {
    Member& member = request.members[i];
    if (sizes[i] > 0) std::memcpy(next, buffer_at(frame.arguments, static_cast<int64_t>(i)).data, sizes[i]);
    Buffer buffer{next, in_place ? next : nullptr};
    next += aligned(sizes[i]);
    if (in_place) call.results.push_back({buffer.target, sizes[i]});
    if (request.kind == Kind::reducescatter) {
      const auto rows = static_cast<size_t>(rows_of(member.shape.at(0), index, ranks).count);
      const size_t row_bytes = member.shape[0] == 0 ? 0 : sizes[i] / static_cast<size_t>(member.shape[0]);
      buffer.target = next;
      call.results.push_back({next, rows * row_bytes});
      next += aligned(sizes[i]);
    }
    if (engine_allocates) {
      buffer.first_dim = member.shape.at(0);
      if (request.kind == Kind::alltoall) buffer.splits.assign(ranks, buffer.first_dim / static_cast<int64_t>(ranks));
      member.shape[0] = Member::kAnyLength;
    }
    buffers.push_back(std::move(buffer));
  }
  if (request.kind != Kind::barrier) return buffers;
  request.members.clear();  // which only passes through
  return {};
}

xla::ErrorCode code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::mismatch:
      return xla::kInvalidArgument;
    case ErrorKind::rank_lost:
      return xla::kUnavailable;
    case ErrorKind::stalled:
      return xla::kDeadlineExceeded;
    case ErrorKind::engine_stopped:
      return xla::kCancelled;
    case ErrorKind::internal:
      break;
  }
  return xla::kInternal;
}

Failure failure_of(const Handle& handle) {
  const Error* error = handle.error();
  return error == nullptr ? Failure{} : Failure{code_of(error->kind), error->message};
}

// Throws what the engine throws.
void hand_over(const xla::CallFrame& frame, const std::shared_ptr<Call>& call) {
  const Arguments given(frame.attributes);
  auto request = request_of(frame, given);
  call->what = std::string(name_of(request->kind)) + " '" + request->name + "'";
  const auto engine = running_engine();
  check_place(*engine, given);
  auto buffers = stage(frame, given, *request, *call);
  call->handle = submit(*engine, std::move(request), std::move(buffers), static_cast<int>(given.number("process_set")),
                        [call](const Handle& handle) { calls().settle(call, failure_of(handle)); });
}

std::vector<Target> results_of(const xla::CallFrame& frame) {
  std::vector<Target> results;
  for (int64_t i = 0; i < frame.results.size; ++i) {
    const xla::Buffer& buffer = buffer_at(frame.results, i);
    results.push_back({static_cast<std::byte*>(buffer.data), bytes_in(buffer)});
  }
  return results;
}

// The engine's own errors begin with the operation.
std::string named(const std::exception& error, const Call& call) {
  const std::string text = error.what();
  return text.starts_with(call.what) ? text : call.what + ": " + text;
}

Failure internal(const std::exception& error) { return {xla::kInternal, std::string("horovodish: ") + error.what()}; }

}  // namespace

xla::Error* xla_start(xla::CallFrame* frame) {
  if (answers_metadata(*frame)) return nullptr;
  try {
    check_interface(*frame);
    const auto call = std::make_shared<Call>();
    try {
      hand_over(*frame, call);
    } catch (const std::exception& error) {
      calls().settle(call, {xla::kInternal, named(error, *call)});
    }
    *static_cast<int32_t*>(buffer_at(frame->results, 0).data) = calls().add(call);
    return nullptr;
  } catch (const std::exception& error) {
    return error_of(*frame->api, internal(error));
  }
}

xla::Error* xla_done(xla::CallFrame* frame) {
  if (answers_metadata(*frame)) return nullptr;
  const xla::Api& api = *frame->api;
  try {
    check_interface(*frame);
    const xla::Buffer& numbers = buffer_at(frame->arguments, 0);
    const auto index = static_cast<size_t>(Arguments(frame->attributes).number("index"));
    const auto waits = [&](std::vector<Target> wanted) {
      xla::FutureCreateArgs args{sizeof(args), nullptr, nullptr};
      if (api.future_create(&args) != nullptr) throw std::runtime_error("XLA gave no future");
      frame->future = args.future;
      return Waiter{&api, args.future, std::move(wanted)};
    };
    const Failure failure = calls().finish(static_cast<const int32_t*>(numbers.data),
                                           static_cast<size_t>(numbers.dims[0]), index, results_of(*frame), waits);
    return failure.message.empty() ? nullptr : error_of(api, failure);
  } catch (const std::exception& error) {
    return error_of(api, internal(error));
  }
}

}  // namespace horovodish
