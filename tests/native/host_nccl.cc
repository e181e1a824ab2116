// The NCCL functions that the engine calls, over host memory and the streams of host_cuda.cc: for tests on machines without
// a GPU. Ranks of one host find each other by files in a folder that the unique id names.
//
// It is as unhelpful as NCCL may be. A call only begins its work before it returns; the work goes to the stream while
// ncclCommGetAsyncError is called. Any call in between fails. So does a call without the context of the communicator's
// device, within a group that is open by mistake, or after the communicator's end. The end of a communicator waits for
// all work of its device, as freeing memory does. A communicator has threads, which the first call of the id,
// connecting and the first group make. It proves nothing about speed.
//
//     PRETEND_NCCL_VERSION   what ncclGetVersion says
//     PRETEND_NCCL_FAILS     the number of the group, from 1, that ends in an error of the network on every rank
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "arithmetic/half.h"
#include "host_stream.h"

namespace {

namespace fs = std::filesystem;
using Bytes = std::string;

constexpr int kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;
constexpr int kPollsUntilBegun = 3;
constexpr std::chrono::microseconds kNap{50};
constexpr std::chrono::milliseconds kThreadNap{20};
constexpr int kFirstFactor = 5;

enum Op { sum, product, maximum, minimum, average };
constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

struct UniqueId {
  char folder[128];
};

thread_local std::string last_error;

struct Communicator {
  std::string folder;
  int rank = 0, ranks = 1, device = 0;
  std::atomic<bool> aborted{false};
  std::atomic<int> state{kInProgress};
  int polls = kPollsUntilBegun;
  bool finalized = false;
  uint64_t groups = 0;
  std::deque<std::function<void()>> begun;  // put on streams when it is asked
  std::map<int, std::pair<int, long double>> factors;
  int last_factor = kFirstFactor - 1;
  uint64_t messages = 0;  // of collectives
  std::map<std::pair<int, int>, uint64_t> sent;  // by sender and receiver
};

std::mutex mutex;
std::set<void*> alive;  // communicators that have not been ended; guarded by mutex
std::map<int, std::set<void*>> streams;  // on which kernels were put, by device; guarded by mutex

Communicator* communicator_of(void* handle) { return static_cast<Communicator*>(handle); }

int refused(const char* why) {
  last_error = why;
  return kInvalidUsage;
}

// Returns whether the calling thread may use it.
bool usable(void* handle) {
  std::lock_guard lock(mutex);
  return alive.contains(handle) && pretend::in_context(communicator_of(handle)->device);
}
// Returns whether it may take a call now.
bool idle(void* handle) {
  return usable(handle) && communicator_of(handle)->state == kSuccess && !communicator_of(handle)->finalized;
}

std::atomic<int> destroyed{0};

int end(void* handle) {
  Communicator* const communicator = communicator_of(handle);
  std::set<void*> given;
  {
    std::lock_guard lock(mutex);
    alive.erase(handle);
    given = streams[communicator->device];
  }
  communicator->aborted = true;  // the communicator's kernels that wait for peers end; the stand-in frees nothing
  for (void* stream : given) pretend::stream_of(stream).wait();
  return kSuccess;
}

// One of NCCL's, which inherits what the calling thread is allowed; it ends with the communicator, if it has one.
void start_thread(Communicator* communicator, const char* name) {
  std::thread thread([communicator] {
    while (communicator == nullptr || !communicator->aborted) std::this_thread::sleep_for(kThreadNap);
  });
  pthread_setname_np(thread.native_handle(), name);
  thread.detach();
}

void write_file(const fs::path& path, const void* data, size_t bytes) {
  const fs::path unfinished = path.string() + ".unfinished";
  std::ofstream(unfinished, std::ios::binary)
      .write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  fs::rename(unfinished, path);
}

// Waits for the file. Returns false if the communicator is aborted first.
bool read_file(Communicator& communicator, const fs::path& path, Bytes& content) {
  while (!fs::exists(path)) {
    if (communicator.aborted) return false;
    std::this_thread::sleep_for(kNap);
  }
  std::ifstream file(path, std::ios::binary);
  content.assign(std::istreambuf_iterator<char>(file), {});
  return true;
}

// Gathers every rank's contribution, by rank. Returns false if the communicator is aborted first.
bool exchange(Communicator& communicator, uint64_t number, const void* own, size_t bytes, std::vector<Bytes>& all) {
  const auto path = [&](uint64_t which, int rank) {
    return fs::path(communicator.folder) / (std::to_string(which) + "." + std::to_string(rank));
  };
  write_file(path(number, communicator.rank), own, bytes);
  all.resize(static_cast<size_t>(communicator.ranks));
  for (int rank = 0; rank < communicator.ranks; ++rank) {
    if (!read_file(communicator, path(number, rank), all[static_cast<size_t>(rank)])) return false;
  }
  // Who contributes to this one has read all of those before.
  if (number > 0) fs::remove(path(number - 1, communicator.rank));
  return true;
}

long double load(const char* at, int type) {
  const auto as = [at]<class T>(T value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (type) {
    case 0:
      return as(int8_t{});
    case 1:
      return as(uint8_t{});
    case 2:
      return as(int32_t{});
    case 4:
      return as(int64_t{});
    case 6:
      return horovodish::to_float(as(horovodish::Float16{}));
    case 7:
      return as(float{});
    case 8:
      return as(double{});
    default:
      return horovodish::to_float(as(horovodish::BFloat16{}));
  }
}

void store(char* at, int type, long double value) {
  const auto as = [at](auto result) { std::memcpy(at, &result, sizeof result); };
  const auto wrapped = static_cast<uint64_t>(static_cast<int64_t>(value));
  switch (type) {
    case 0:
    case 1:
      return as(static_cast<uint8_t>(wrapped));
    case 2:
      return as(static_cast<uint32_t>(wrapped));
    case 4:
      return as(wrapped);
    case 6:
      return as(horovodish::to_float16(static_cast<float>(value)));
    case 7:
      return as(static_cast<float>(value));
    case 8:
      return as(static_cast<double>(value));
    default:
      return as(horovodish::to_bfloat16(static_cast<float>(value)));
  }
}

// [begin, begin + count) of the ranks' vectors; each rank multiplied its own by its factor before.
void reduce(const std::vector<Bytes>& all, char* target, size_t begin, size_t count, int type, int op) {
  const size_t size = kSizes[type];
  for (size_t i = 0; i < count; ++i) {
    long double value = load(all[0].data() + (begin + i) * size, type);
    for (size_t rank = 1; rank < all.size(); ++rank) {
      const long double other = load(all[rank].data() + (begin + i) * size, type);
      if (op == product)
        value *= other;
      else if (op == maximum)
        value = std::max(value, other);
      else if (op == minimum)
        value = std::min(value, other);
      else
        value += other;
    }
    if (op == average) value /= static_cast<long double>(all.size());
    store(target + i * size, type, value);
  }
}

Bytes multiplied(const void* source, size_t count, int type, long double factor) {
  Bytes result(static_cast<const char*>(source), count * kSizes[type]);
  for (size_t i = 0; i < count; ++i) {
    char* const at = result.data() + i * kSizes[type];
    store(at, type, load(at, type) * factor);
  }
  return result;
}

struct Group {
  int depth = 0;
  Communicator* communicator = nullptr;
  void* stream = nullptr;
  std::vector<std::function<bool()>> calls;
};
thread_local Group group;

int begin_call(void* handle, void* stream, std::function<bool()> call) {
  Communicator* const communicator = communicator_of(handle);
  if (!idle(handle) || group.depth == 0) return refused("called while the communicator was busy, or without a group");
  if (group.communicator != nullptr && group.communicator != communicator)
    return refused("a group of two communicators");
  const int device = pretend::stream_of(stream).device;
  if (device != communicator->device) return refused("a stream of another device than the communicator's");
  group.communicator = communicator;
  group.stream = stream;
  group.calls.push_back(std::move(call));
  return kSuccess;
}

int reduction(const void* source, size_t count, int type, int op, void* handle, void* stream,
              std::function<void(const std::vector<Bytes>&)> then) {
  if (!usable(handle)) return refused("a communicator that has ended, or of another device");
  Communicator* const communicator = communicator_of(handle);
  long double factor = 1;
  if (op >= kFirstFactor) {
    const auto found = communicator->factors.find(op);
    if (found == communicator->factors.end() || found->second.first != type) {
      last_error = "a factor that does not exist";
      return kInvalidArgument;
    }
    factor = found->second.second;
  }
  const uint64_t number = communicator->messages++;
  return begin_call(handle, stream, [=, then = std::move(then)] {
    std::vector<Bytes> all;
    const Bytes own = multiplied(source, count, type, factor);
    if (!exchange(*communicator, number, own.data(), own.size(), all)) return false;
    then(all);
    return true;
  });
}

}  // namespace

extern "C" {

int ncclGetVersion(int* version) {
  const char* text = std::getenv("PRETEND_NCCL_VERSION");
  *version = text == nullptr ? 22907 : std::atoi(text);
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  return result == kRemoteError ? "remote process exited" : "invalid usage";
}
const char* ncclGetLastError(void*) { return last_error.c_str(); }

int ncclGetUniqueId(UniqueId* id) {
  std::string folder = (fs::temp_directory_path() / "pretend-XXXXXX").string();
  if (!pretend::in_context()) return refused("no context");
  if (mkdtemp(folder.data()) == nullptr) return kInvalidUsage;
  std::strncpy(id->folder, folder.c_str(), sizeof id->folder - 1);
  start_thread(nullptr, "nccl-root");
  return kSuccess;
}

int ncclCommInitRankConfig(void** handle, int ranks, UniqueId id, int rank, const char* config) {
  size_t size = 0;
  unsigned magic = 0;
  int blocking = 1;
  std::memcpy(&size, config, sizeof size);
  std::memcpy(&magic, config + 8, sizeof magic);
  std::memcpy(&blocking, config + 16, sizeof blocking);
  if (size < 20 || magic != 0xcafebeef || blocking != 0) return kInvalidArgument;
  if (!pretend::in_context() || group.depth > 0) return refused("no context, or an open group");
  auto* const communicator = new Communicator;
  communicator->device = pretend::current_device();
  communicator->folder = id.folder;
  communicator->rank = rank;
  communicator->ranks = ranks;
  *handle = communicator;
  {
    std::lock_guard lock(mutex);
    alive.insert(communicator);
  }
  start_thread(communicator, "nccl-proxy");
  const uint64_t number = communicator->messages++;
  std::thread([communicator, number] {
    std::vector<Bytes> all;
    if (exchange(*communicator, number, "", 0, all)) communicator->state = kSuccess;
  }).detach();
  return kInProgress;
}

int ncclCommGetAsyncError(void* handle, int* state) {
  if (!usable(handle) || group.depth > 0) return refused("a communicator that has ended, or an open group");
  Communicator* const communicator = communicator_of(handle);
  if (!communicator->begun.empty() && --communicator->polls == 0) {
    communicator->polls = kPollsUntilBegun;
    communicator->begun.front()();
    communicator->begun.pop_front();
    if (communicator->begun.empty() && communicator->state == kInProgress) communicator->state = kSuccess;
  }
  *state = communicator->state;
  return kSuccess;
}

int ncclCommFinalize(void* handle) {
  if (!idle(handle) || group.depth > 0) return refused("finalized while the communicator was busy");
  Communicator* const communicator = communicator_of(handle);
  communicator->finalized = true;
  communicator->state = kInProgress;
  communicator->begun.push_back([] {});
  return kInProgress;
}

// How many communicators have been destroyed, and not aborted.
int pretend_destroyed() { return destroyed; }

int ncclCommDestroy(void* handle) {
  Communicator* const communicator = communicator_of(handle);
  if (!usable(handle) || group.depth > 0 || !communicator->finalized || communicator->state != kSuccess) {
    return refused("a communicator that was not finalized");
  }
  ++destroyed;
  return end(handle);
}

int ncclCommAbort(void* handle) {
  if (!usable(handle) || group.depth > 0) return refused("a communicator that has ended, or an open group");
  return end(handle);
}

int ncclRedOpCreatePreMulSum(int* op, const char* scalar, int type, int residence, void* handle) {
  Communicator* const communicator = communicator_of(handle);
  if (residence != 1 || !idle(handle) || group.depth > 0) return refused("an operator of a busy communicator");
  *op = ++communicator->last_factor;
  communicator->factors[*op] = {type, load(scalar, type)};
  return kSuccess;
}
int ncclRedOpDestroy(int op, void* handle) {
  if (!idle(handle)) return refused("an operator of a busy communicator");
  return communicator_of(handle)->factors.erase(op) == 1 ? kSuccess : kInvalidArgument;
}

int ncclGroupStart() {
  ++group.depth;
  return kSuccess;
}

int ncclGroupEnd() {
  if (group.depth == 0) return refused("a group that was not begun");
  if (--group.depth > 0 || group.communicator == nullptr) return kSuccess;
  const Group ended = std::exchange(group, {});
  Communicator& communicator = *ended.communicator;
  const char* fails = std::getenv("PRETEND_NCCL_FAILS");
  if (++communicator.groups == 1) start_thread(&communicator, "nccl-launch");
  const bool fail = fails != nullptr && communicator.groups == static_cast<uint64_t>(std::atoi(fails));
  communicator.state = kInProgress;
  {
    std::lock_guard lock(mutex);
    streams[communicator.device].insert(ended.stream);
  }
  communicator.begun.push_back([&communicator, ended, fail] {
    pretend::push(ended.stream, [&communicator, ended, fail] {
      if (fail) communicator.state = kRemoteError;
      // Works as one kernel: all sends are under way before it waits for anything.
      auto calls = ended.calls;
      for (auto& call : calls) {
        if (fail || communicator.aborted || !call()) return;
      }
    });
  });
  return kInProgress;
}

int ncclAllReduce(const void* source, void* target, size_t count, int type, int op, void* handle, void* stream) {
  return reduction(source, count, type, op, handle, stream,
                   [=](const std::vector<Bytes>& all) { reduce(all, static_cast<char*>(target), 0, count, type, op); });
}

int ncclReduce(const void* source, void* target, size_t count, int type, int op, int root, void* handle, void* stream) {
  const bool receives = communicator_of(handle)->rank == root;
  return reduction(source, count, type, op, handle, stream, [=](const std::vector<Bytes>& all) {
    if (receives) reduce(all, static_cast<char*>(target), 0, count, type, op);
  });
}

int ncclReduceScatter(const void* source, void* target, size_t count, int type, int op, void* handle, void* stream) {
  const Communicator& communicator = *communicator_of(handle);
  const auto begin = static_cast<size_t>(communicator.rank) * count;
  return reduction(
      source, count * static_cast<size_t>(communicator.ranks), type, op, handle, stream,
      [=](const std::vector<Bytes>& all) { reduce(all, static_cast<char*>(target), begin, count, type, op); });
}

int ncclBroadcast(const void* source, void* target, size_t count, int type, int root, void* handle, void* stream) {
  const bool sends = communicator_of(handle)->rank == root;
  const size_t mine = sends ? count : 0;
  return reduction(source, mine, type, sum, handle, stream, [=](const std::vector<Bytes>& all) {
    std::memcpy(target, all[static_cast<size_t>(root)].data(), count * kSizes[type]);
  });
}

int ncclAllGather(const void* source, void* target, size_t count, int type, void* handle, void* stream) {
  return reduction(source, count, type, sum, handle, stream, [=](const std::vector<Bytes>& all) {
    char* at = static_cast<char*>(target);
    for (const Bytes& part : all) {
      std::memcpy(at, part.data(), part.size());
      at += part.size();
    }
  });
}

int ncclSend(const void* source, size_t count, int type, int peer, void* handle, void* stream) {
  Communicator* const communicator = communicator_of(handle);
  const uint64_t number = communicator->sent[{communicator->rank, peer}]++;
  const int result = begin_call(handle, stream, [=] {
    const auto name = std::to_string(communicator->rank) + "to" + std::to_string(peer) + "." + std::to_string(number);
    write_file(fs::path(communicator->folder) / name, source, count * kSizes[type]);
    return true;
  });
  // All sends of a group are sent before it waits for its receives.
  if (result == kSuccess) std::rotate(group.calls.begin(), group.calls.end() - 1, group.calls.end());
  return result;
}

int ncclRecv(void* target, size_t count, int type, int peer, void* handle, void* stream) {
  Communicator* const communicator = communicator_of(handle);
  const bool itself = peer == communicator->rank;
  const uint64_t number =
      itself ? communicator->sent[{communicator->rank, peer}] - 1 : communicator->sent[{peer, communicator->rank}]++;
  return begin_call(handle, stream, [=] {
    Bytes content;
    const auto name = std::to_string(peer) + "to" + std::to_string(communicator->rank) + "." + std::to_string(number);
    const fs::path path = fs::path(communicator->folder) / name;
    if (!read_file(*communicator, path, content)) return false;
    std::memcpy(target, content.data(), std::min(content.size(), count * kSizes[type]));
    fs::remove(path);
    return true;
  });
}

}  // extern "C"
