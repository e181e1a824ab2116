#include "planes/nccl/nccl.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "memory/clock.h"
#include "memory/thread_setup.h"
#include "negotiation/wire.h"

namespace horovodish {

namespace {

// How long a rank waits for its GPU's remaining work when a peer has gone.
constexpr std::chrono::milliseconds kFarewellLimit{1000};
constexpr std::chrono::milliseconds kFarewellNap{1};
constexpr std::chrono::milliseconds kEndLimit{1000};
// NCCL launches from its own thread (all versions from 2.27 on), and a nap of the engine would be too long for that.
constexpr std::chrono::microseconds kLaunchSpin{200};

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

NcclPlane::NcclPlane(const ProcessSetConfig& config, const EngineOptions& options, std::unique_ptr<Plane> host,
                     LaunchOrder& order, LaunchedOperations& launched, OnEnd on_end)
    : config_(config),
      alone_(options.plane == "nccl"),
      shared_gpu_(options.shared_gpu),
      host_(std::move(host)),
      order_(order),
      launched_operations_(launched),
      on_end_(std::move(on_end)) {
  order_.open(config_.id);
}

NcclPlane::~NcclPlane() {
  order_.close(config_.id);
  Operation* const launching = !items_.empty() && items_.front()->launch ? items_.front()->operation.get() : nullptr;
  if (communicator_) {
    end_communicator(launching);
  } else {  // these are copies within this GPU, which nobody aborts
    for (const Launched& copy : launched_) launched_operations_.end(copy.number);
  }
  for (const Launched& its : launched_) {
    if (!its.done->done()) keep_for_ever(its.memory);
  }
  if (launching != nullptr && (!launching->done || !launching->done->done())) keep_for_ever(launching->memory);
}

// `launching`: an operation whose launch has begun, or null. Its memory is in use until the aborted kernel has ended.
void NcclPlane::end_communicator(Operation* launching) noexcept {
  drain(kFarewellLimit);  // of operations where a rank did its part before it left without an error
  const bool all_done = launched_.empty() && launching == nullptr;
  lose_launched();  // before the communicator is aborted: the abort makes their events come
  try {
    const Device::Scope scope(*device_);
    if (all_done) communicator_->finalize(kFarewellLimit);
    if (!communicator_->end(kEndLimit) || all_done) return;
    const std::shared_ptr<DeviceEvent> last = device_->record(device_->stream());
    if (launching != nullptr) launching->done = last;
    const auto limit = Clock::now() + kEndLimit;
    while (!last->done() && Clock::now() < limit) Clock::sleep(kFarewellNap);
  } catch (const std::exception&) {  // the GPU has failed, or CUDA has ended with the process
  }
}

void NcclPlane::drain(std::chrono::milliseconds limit) {
  const auto end = Clock::now() + limit;
  try {
    for (look_at_launched(); !launched_.empty() && Clock::now() < end; look_at_launched()) {
      Clock::sleep(kFarewellNap);
    }
  } catch (const std::exception&) {  // nothing more will come
  }
}

void NcclPlane::about_to_end(const Error& why) noexcept {
  try {
    end_ = why;
  } catch (const std::bad_alloc&) {
  }
}

void NcclPlane::start(std::shared_ptr<Operation> operation) {
  if (operation->request->on_host()) return host_->start(std::move(operation));
  const auto item = std::make_shared<Item>();
  item->operation = std::move(operation);
  items_.push_back(item);
  order(*item->operation);
  const Request& request = *item->operation->request;
  if (is_local_copy(request)) return;
  // All ranks must do this for the same operations. They hear the result at different times, so only decided facts may
  // count here.
  if (!validation_ || (validation_->any_joined && !item->operation->any_joined)) exchange_bootstrap(*item->operation);
  item->validation = validation_;
  if (request.any_rows()) count(item);
}

bool NcclPlane::advance() {
  bool progressed = host_->advance();
  if (items_.empty() && launched_.empty()) return progressed;
  look_at_launched();
  while (!items_.empty() && advance_first()) progressed = true;
  return progressed;
}

// One rank, no scaling.
bool NcclPlane::is_local_copy(const Request& request) const {
  const bool reduces = request.kind == Kind::allreduce || request.kind == Kind::reducescatter;
  const bool scales = reduces && (request.prescale != 1.0 || request.postscale != 1.0);
  return config_.ranks.size() == 1 && !alone_ && !scales;
}

// The host's plane starts operations in one order on all ranks, so this one needs no decision.
void NcclPlane::exchange_texts(const std::string& name, const std::string& text,
                               std::function<void(const std::vector<std::string>&)> then) {
  auto request = std::make_shared<Request>();
  request->kind = Kind::allgather;
  request->name = name;
  request->members = {{name, DType::uint8, {Member::kAnyLength}}};
  const auto said = std::make_shared<const std::string>(text);
  const Buffer buffer{reinterpret_cast<const std::byte*>(said->data()), nullptr, {static_cast<int64_t>(said->size())}};
  auto operation = operation_of(request, {buffer}, config_.id, std::make_shared<Handle>(0));
  operation->contributors = static_cast<int>(config_.ranks.size());
  operation->inner = [said, handle = operation->handle, then = std::move(then)] {
    const Handle::Output& output = handle->outputs.at(0);
    const char* at = reinterpret_cast<const char*>(output.data.get());
    std::vector<std::string> told;
    for (const int64_t length : output.rows) {
      told.emplace_back(at, static_cast<size_t>(length));
      at += length;
    }
    then(told);
  };
  host_->start(std::move(operation));
}

void NcclPlane::order(const Operation& operation) {
  if (config_.id == 0 || config_.ranks.size() == 1) {
    order_.add(config_.id, operation.decision);
  } else if (config_.own == 0) {
    order_.ask(config_.id, operation.decision);
  }
}

void NcclPlane::exchange_bootstrap(const Operation& operation) {
  validation_ = std::make_shared<Validation>();
  validation_->any_joined = operation.any_joined;
  Bootstrap own;
  own.host = host_name();
  own.ordinal = operation.request->device;
  own.shares = shared_gpu_;
  try {
    const abi::Nccl* const nccl = nccl_library();
    if (own.ordinal < 0) {
      throw std::runtime_error(
          "it joined before it used a GPU, so the engine does not know which GPU to use. Remedy: pass "
          "join(device=torch.cuda.current_device())");
    }
    device_ = &Device::get(own.ordinal);
    if (nccl == nullptr) throw std::runtime_error("NCCL was not found. Remedy: pip install nvidia-nccl-cu12 or -cu13");
    own.gpu = device_->name();
    own.gpu_id = device_->uuid();
    own.nccl_version = nccl->version;
    if (config_.own == 0 && !communicator_) {
      const Device::Scope scope(*device_);
      const NewThreadsAnywhere cores;
      abi::NcclUniqueId id{};
      if (nccl->get_unique_id(&id) != abi::NcclResult::success) {
        throw std::runtime_error(
            std::string("NCCL cannot open a socket for the other ranks: ") + nccl->get_last_error(nullptr) +
            ". Remedy: set NCCL_DEBUG=INFO to get NCCL's log; NCCL_SOCKET_IFNAME chooses the network");
      }
      own.id.assign(id.bytes, sizeof id.bytes);
    }
  } catch (const std::exception& error) {
    own.problem = error.what();
  }
  Writer writer;
  writer.write(own);
  exchange_texts("the ranks' GPUs", writer.take(),
                 [this, validation = validation_](const auto& told) { validate(told, *validation); });
}

void NcclPlane::validate(const std::vector<std::string>& told, Validation& validation) const {
  std::vector<Bootstrap> ranks;
  for (const std::string& text : told) ranks.push_back(Reader(text).read<Bootstrap>());
  validation.refusal = refusal(ranks);
  if (validation.refusal.empty())
    ranks[0].id.copy(validation.id.bytes, sizeof validation.id.bytes);  // empty once connected
  validation.known = true;
}

// Why these ranks cannot have a communicator, in clearer words than NCCL's; empty if they can.
std::string NcclPlane::refusal(const std::vector<Bootstrap>& ranks) const {
  const auto name = [this](size_t index) { return text_of(config_.ranks[index]); };
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!ranks[i].problem.empty()) return name(i) + " on host " + ranks[i].host + ": " + ranks[i].problem;
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].nccl_version != ranks[0].nccl_version) {
      return name(0) + " has NCCL " + version_text(ranks[0].nccl_version) + ", " + name(i) + " on host " +
             ranks[i].host + " has NCCL " + version_text(ranks[i].nccl_version) +
             ". Remedy: install the same version on every host.";
    }
    for (size_t j = 0; j < i; ++j) {
      if (ranks[i].gpu_id != ranks[j].gpu_id || (ranks[i].shares && ranks[j].shares)) continue;
      return name(j) + " and " + name(i) + " both use GPU " + std::to_string(ranks[i].ordinal) + " (" + ranks[i].gpu +
             ") of host " + ranks[i].host +
             ", and NCCL needs a GPU for each rank. Remedy: let every rank choose its own GPU before it uses CUDA, by "
             "torch.cuda.set_device(hvd.local_rank()), and start no more ranks on a host than it has GPUs.";
    }
  }
  return {};
}

void NcclPlane::count(const std::shared_ptr<Item>& item) {
  std::string own;
  for (const Buffer& buffer : item->operation->buffers) {
    own.append(reinterpret_cast<const char*>(buffer.rows.data()), buffer.rows.size() * sizeof(int64_t));
  }
  exchange_texts(item->operation->request->name + ": rows", own, [item](const std::vector<std::string>& told) {
    for (const std::string& its : told) {
      std::vector<int64_t>& rows = item->rows.emplace_back(its.size() / sizeof(int64_t));
      std::memcpy(rows.data(), its.data(), its.size());
    }
  });
}

// Returns true if the first operation has moved on.
bool NcclPlane::advance_first() {
  const std::shared_ptr<Item> item = items_.front();
  Operation& operation = *item->operation;
  const bool is_local_copy = this->is_local_copy(*operation.request);
  const bool is_counted = !operation.request->any_rows() || !item->rows.empty();
  if (!is_local_copy && !(is_counted && item->validation->known)) return false;
  if (!order_.is_next(config_.id, operation.decision)) {
    if (config_.id != 0 && !order_.ended().empty()) throw std::runtime_error(order_.ended());
    return false;
  }
  if (is_local_copy) {
    copy_alone(operation);
    end(nullptr);
    return true;
  }
  const std::string problem =
      item->validation->refusal.empty() ? problem_for_nccl(*operation.request) : item->validation->refusal;
  if (!problem.empty()) {
    const Error error{ErrorKind::internal, problem};
    end(&error);
    return true;
  }
  const Device::Scope scope(*device_);
  if (!communicator_) {
    const Trace::Span span(operation.trace, Phase::connect);
    communicator_ = std::make_unique<NcclCommunicator>(*nccl_library(), *device_, item->validation->id,
                                                       static_cast<int>(config_.ranks.size()), config_.own);
    return true;
  }
  if (!communicator_->ready()) return false;
  if (!item->launch) return launch(*item);
  unpack(*item);
  end(nullptr);
  return true;
}

bool NcclPlane::launch(Item& item) {
  Operation& operation = *item.operation;
  for (const auto& event : operation.ready) event->order_after(device_->stream());
  {
    const Trace::Span span(operation.trace, Phase::pack);
    item.launch = std::make_unique<NcclLaunch>(operation, item.rows, *communicator_, *device_, config_.own,
                                               static_cast<int>(config_.ranks.size()));
    item.launch->pack();
  }
  const Trace::Span span(operation.trace, Phase::nccl, true);
  item.launch->call();
  const auto end = Clock::now() + kLaunchSpin;
  while (!communicator_->ready() && Clock::now() < end) std::this_thread::yield();
  return true;
}

void NcclPlane::unpack(Item& item) {
  const Trace::Span span(item.operation->trace, Phase::unpack);
  item.launch->unpack();
  launched(*item.operation, *device_);
}

void NcclPlane::launched(Operation& operation, Device& device) {
  const auto done = device.record(device.stream());
  launched_.push_back(
      {0, Clock::now(), operation.request, std::move(operation.ready), done, operation.handle, operation.memory});
  launched_.back().number = launched_operations_.begin();
  operation.done = done;
}

// Ends the first operation.
void NcclPlane::end(const Error* error) {
  const auto operation = std::move(items_.front()->operation);
  items_.pop_front();
  order_.launched();
  on_end_(operation, error);
}

void NcclPlane::copy_alone(Operation& operation) {
  const Request& request = *operation.request;
  Device& device = Device::get(request.device);
  const Device::Scope scope(device);
  const Trace::Span span(operation.trace, Phase::unpack);
  for (const auto& event : operation.ready) event->order_after(device.stream());
  std::vector<DeviceCopy> copies;
  for (size_t i = 0; i < request.members.size(); ++i) {
    const Member& member = request.members[i];
    const Buffer& buffer = operation.buffers[i];
    if (request.any_rows()) {
      const size_t bytes = row_bytes(member) * static_cast<size_t>(buffer.rows[0]);
      operation.handle->outputs.push_back({nullptr, bytes, buffer.rows, device.allocate(bytes, device.stream())});
      copies.push_back({operation.handle->outputs.back().on_device->data(), buffer.source, bytes});
    } else {
      copies.push_back({buffer.target, buffer.source, static_cast<size_t>(member.count()) * bytes_of(member.dtype)});
    }
  }
  device.copy(copies, device.stream());
  launched(operation, device);
}

// Forgets the operations that the GPU has completed. Throws errors from the background. An error of NCCL also ends a
// kernel, so an event counts only if NCCL reports no error after it.
void NcclPlane::look_at_launched() {
  size_t come = 0;
  while (come < launched_.size() && launched_[come].done->done()) launched_[come++].done->check();
  if (communicator_) {
    const Device::Scope scope(*device_);
    communicator_->ready();
  }
  for (; come > 0; --come) {
    launched_operations_.end(launched_.front().number);
    launched_.pop_front();
  }
}

void NcclPlane::lose_launched() noexcept {
  const ErrorKind kind = end_.kind == ErrorKind::stalled ? ErrorKind::stalled : ErrorKind::rank_lost;
  for (const Launched& its : launched_) {
    Error why{kind, kOutOfMemory};
    try {
      why.message = subject_of(*its.request) + " failed on " +
                    text_of(config_.ranks[static_cast<size_t>(config_.own)]) +
                    " after it was launched on its GPU: " + end_.message;
    } catch (const std::bad_alloc&) {
    }
    its.handle->lose(why);
    launched_operations_.lose(its.number, why);
  }
}

}  // namespace horovodish
