#include "xla/xla_call.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/frontend.h"

namespace horovodish {

namespace {

// In the order of DType.
constexpr std::array<xla::DataType, kDTypeNames.size()> kDTypes{xla::kPred, xla::kU8,  xla::kS8,   xla::kS16, xla::kS32,
                                                                xla::kS64,  xla::kF16, xla::kBF16, xla::kF32, xla::kF64,
                                                                xla::kU16,  xla::kU32, xla::kU64};

DType dtype_of(const xla::Buffer& buffer) {
  const auto found = std::find(kDTypes.begin(), kDTypes.end(), buffer.dtype);
  if (found == kDTypes.end()) throw std::runtime_error("the engine does not know this dtype");
  return static_cast<DType>(found - kDTypes.begin());
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
    case ErrorKind::duplicate_name:
    case ErrorKind::forked_process:
    case ErrorKind::bad_argument:
    case ErrorKind::internal:
      break;
  }
  return xla::kInternal;
}

const void* attribute(const xla::CallFrame& frame, std::string_view name, xla::AttributeType type) {
  const xla::Attributes& all = frame.attributes;
  for (int64_t i = 0; i < all.size; ++i) {
    if (std::string_view(all.names[i]->data, all.names[i]->size) != name) continue;
    if (all.types[i] != type) break;
    return all.values[i];
  }
  throw std::runtime_error(
      "a collective of the program has no attribute " + std::string(name) +
      ", so another version of horovodish compiled the program. Remedy: delete the stored program, and compile it "
      "again.");
}

const void* scalar_attribute(const xla::CallFrame& frame, std::string_view name, xla::DataType type) {
  const auto* scalar = static_cast<const xla::Scalar*>(attribute(frame, name, xla::kScalarAttribute));
  if (scalar->dtype != type) throw std::runtime_error("attribute " + std::string(name) + " is of another type");
  return scalar->value;
}

double given_real(const xla::CallFrame& frame, std::string_view name) {
  return *static_cast<const double*>(scalar_attribute(frame, name, xla::kF64));
}

// The gathered size differs from the compiled size.
Error other_size(const StartedCall& call, size_t index, size_t bytes, size_t compiled_bytes) {
  const std::string member = call.members.size() > 1 ? ", tensor '" + call.members.at(index) + "'" : "";
  return {ErrorKind::mismatch,
          call.what + member + ": the ranks gave " + std::to_string(bytes) +
              " bytes, but the program was compiled for " + std::to_string(compiled_bytes) +
              ", the same number from every rank. Remedy: call a collective whose rows differ by rank outside of the "
              "compiled program."};
}

// An error's text, with the operation in front unless the engine's text begins with it.
std::string named(const std::exception& error, const std::string& what) {
  const std::string text = error.what();
  return text.starts_with(what) ? text : what + ": " + text;
}

constexpr const char* kCompileAgain =
    ". Remedy: compile it again after init() (JAX: jax.clear_caches(); TensorFlow: make a new tf.function).";

// A program outlives the world that it was compiled in.
void check_place(const Engine& engine, const RankInGroup& place, const xla::CallFrame& frame) {
  const std::string ranks(given_text(frame, "ranks"));
  if (given_number(frame, "rank") == number_of(engine.rank()) && ranks == place.ranks) return;
  throw std::runtime_error("the program was compiled on rank " + std::to_string(given_number(frame, "rank")) +
                           " for a process set of the ranks " + ranks + ", but the ranks of that set are now " +
                           (place.ranks.empty() ? "none" : place.ranks) + ", and this is " + text_of(engine.rank()) +
                           kCompileAgain);
}

// The gradients of a compiled program's collectives do not change either.
void check_gradients(const Engine& engine, const xla::CallFrame& frame) {
  const int64_t given = given_number(frame, "gradients");
  if (given < 0 || (given != 0) == engine.horovods_gradients()) return;
  throw std::runtime_error(std::string("the program was compiled for ") + (given != 0 ? "Horovod's" : "exact") +
                           " gradients of collectives, but the last init() chose " +
                           (given != 0 ? "exact" : "Horovod's") + " gradients (HOROVODISH_COLLECTIVE_GRADIENTS)" +
                           kCompileAgain);
}

// The runtime asks once, at registration, for the interface version of a handler.
bool answers_metadata(xla::CallFrame& frame) {
  if (frame.extensions == nullptr || frame.extensions->type != xla::kMetadataExtension) return false;
  auto& metadata = *reinterpret_cast<xla::MetadataExtension*>(frame.extensions)->metadata;
  // Early versions ask without their table of functions. They all expect kEarlyMinorVersion.
  const int minor = frame.api == nullptr ? xla::kEarlyMinorVersion : frame.api->api_version.minor_version;
  metadata.api_version = {sizeof(xla::ApiVersion), nullptr, xla::kMajorVersion, minor};
  return true;
}

void check_interface(const xla::CallFrame& frame) {
  if (!speaks_our_interface(*frame.api) || frame.struct_size < offsetof(xla::CallFrame, future)) {
    throw std::runtime_error(
        "this jaxlib speaks another version of XLA's foreign function interface than horovodish. Remedy: use jaxlib "
        "0.7 or later, and report a version that does not work.");
  }
}

std::shared_ptr<Request> request_of(const xla::CallFrame& frame) {
  auto request = std::make_shared<Request>();
  request->kind = static_cast<Kind>(given_number(frame, "kind"));
  request->name = given_text(frame, "name");
  request->op = static_cast<ReduceOp>(given_number(frame, "op"));
  request->prescale = given_real(frame, "prescale");
  request->postscale = given_real(frame, "postscale");
  request->root = WorldRank(static_cast<int>(given_number(frame, "root")));
  request->by_elements = given_number(frame, "by_elements") != 0;
  for (const auto end : lines(given_text(frame, "ends"))) request->ends.push_back(std::stoll(std::string(end)));
  request->compression = compression_of(std::string(given_text(frame, "codec")));
  request->family = {std::string(given_text(frame, "tree")), static_cast<size_t>(given_number(frame, "leaves")),
                     given_number(frame, "structure"), run_of(frame)};
  const auto names = lines(given_text(frame, "members"));
  for (size_t i = 0; i < names.size(); ++i) {
    const xla::Buffer& buffer = buffer_at(frame.arguments, i);
    request->members.push_back(member_of(names[i], dtype_of(buffer), {buffer.dims, buffer.dims + buffer.rank}));
  }
  return request;
}

}  // namespace

std::vector<std::string_view> lines(std::string_view text) {
  std::vector<std::string_view> found;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    found.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return found;
}

Error failure_of(const Handle& handle) {
  const Error* error = handle.error();
  return error == nullptr ? Error{} : *error;
}

xla::Error* error_of(const xla::Api& api, const Error& failure) {
  if (failure.message.empty()) return nullptr;
  xla::ErrorCreateArgs args{sizeof(args), nullptr, failure.message.c_str(), code_of(failure.kind)};
  return api.error_create(&args);
}

std::string_view given_text(const xla::CallFrame& frame, std::string_view name) {
  const auto* span = static_cast<const xla::ByteSpan*>(attribute(frame, name, xla::kStringAttribute));
  return {span->data, span->size};
}

int64_t given_number(const xla::CallFrame& frame, std::string_view name) {
  return *static_cast<const int64_t*>(scalar_attribute(frame, name, xla::kS64));
}

const xla::Buffer& buffer_at(const xla::Buffers& buffers, size_t index) {
  if (index >= static_cast<size_t>(buffers.size) || buffers.types[index] != xla::kBufferType) {
    throw std::runtime_error("an argument or a result is not a buffer");
  }
  return *static_cast<const xla::Buffer*>(buffers.buffers[index]);
}

std::span<std::byte> memory_of(const xla::Buffer& buffer) {
  size_t bytes = bytes_of(dtype_of(buffer));
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= static_cast<size_t>(buffer.dims[i]);
  return {static_cast<std::byte*>(buffer.data), bytes};
}

std::vector<std::span<std::byte>> memory_of(const xla::Buffers& buffers) {
  std::vector<std::span<std::byte>> memory;
  for (size_t i = 0; i < static_cast<size_t>(buffers.size); ++i) memory.push_back(memory_of(buffer_at(buffers, i)));
  return memory;
}

std::vector<std::span<std::byte>> members_of(const xla::CallFrame& frame) {
  std::vector<std::span<std::byte>> memory = memory_of(frame.arguments);
  memory.resize(lines(given_text(frame, "members")).size());
  return memory;
}

Error start(const xla::CallFrame& frame, StartedCall& call,
            const std::function<std::shared_ptr<Handle>(Engine&, std::shared_ptr<Request>, int process_set,
                                                        const RankInGroup&)>& submit_it) {
  try {
    auto request = request_of(frame);
    const Kind kind = request->kind;
    const std::string name = request->name;
    const Family family = request->family;
    const auto process_set = static_cast<int>(given_number(frame, "process_set"));
    call.what = std::string(name_of(kind)) + " '" + name + "'";
    const auto engine = running_engine();
    try {
      const RankInGroup place = engine->place(process_set);
      check_place(*engine, place, frame);
      check_gradients(*engine, frame);
      call.handle = submit_it(*engine, std::move(request), process_set, place);
    } catch (const EngineStopped&) {
      throw;
    } catch (const std::exception& error) {
      engine->refuse(kind, name, process_set, named(error, call.what), family);
      throw;
    }
    return {};
  } catch (const std::exception& error) {
    return {ErrorKind::internal, named(error, call.what)};
  }
}

Error collect(const StartedCall& call, const std::vector<std::span<std::byte>>& wanted,
              const std::function<void(std::span<std::byte>, Handle::Output*, std::span<std::byte>)>& copy) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    Handle::Output* const output = call.results.empty() ? &call.handle->outputs.at(i) : nullptr;
    const std::span<std::byte> result =
        output != nullptr ? std::span<std::byte>(output->data.get(), output->bytes) : call.results.at(i);
    if (result.size() != wanted[i].size()) return other_size(call, i, result.size(), wanted[i].size());
    copy(wanted[i], output, result);
  }
  return {};
}

int64_t new_run() {
  static std::atomic<int64_t> runs{std::numeric_limits<int64_t>::min()};
  return runs++;  // the runtimes' own are of either sign, but small
}

int64_t run_id_of(const xla::CallFrame& frame) {
  xla::RunIdGetArgs args{sizeof(args), nullptr, frame.context, 0};
  if (frame.api->run_id_get(&args) != nullptr) throw std::runtime_error("XLA gave no id for this run of the program");
  return args.run_id;
}

int64_t run_of(const xla::CallFrame& frame) {
  const size_t members =
      lines(given_text(frame, "members")).size() + static_cast<size_t>(given_number(frame, "follows"));
  if (static_cast<size_t>(frame.arguments.size) > members) {
    return *static_cast<const int64_t*>(buffer_at(frame.arguments, members).data);
  }
  const int64_t told = run_id_of(frame);
  return told == 0 ? new_run() : told;
}

bool speaks_our_interface(const xla::Api& api) {
  return api.api_version.major_version == xla::kMajorVersion && api.struct_size >= sizeof(xla::Api);
}

xla::Error* handled(xla::CallFrame& frame, const std::function<Error()>& body) {
  if (answers_metadata(frame)) return nullptr;
  try {
    check_interface(frame);
    return error_of(*frame.api, body());
  } catch (const std::exception& error) {
    return error_of(*frame.api, {ErrorKind::internal, std::string("horovodish: ") + error.what()});
  }
}

}  // namespace horovodish
