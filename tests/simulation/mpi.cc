// The functions of MPI that the engine calls, for ranks that share a process. Messages travel when the test says so: in order
// between two ranks, in any order otherwise. A communicator's handle is its number times kRanks plus the rank in it.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr uintptr_t kRanks = 4096;
constexpr int kFailed = 1, kTruncated = 2;

struct Request {
  int own = 0, peer = 0;  // in the world
  bool done = false, truncated = false;
  void* target = nullptr;  // of a receive
  size_t room = 0;  // likewise
  int from = 0, tag = 0, bytes = 0;
  uintptr_t communicator = 0;  // the receiver's handle
};
using Pointer = std::shared_ptr<Request>;

struct Message {
  uintptr_t communicator;  // the receiver's handle
  int from, tag;  // in the communicator
  std::vector<std::byte> data;
  Pointer sender;  // waits until it is taken
};

struct World {
  std::map<uintptr_t, std::vector<int>> communicators;  // the ranks of the world in each
  std::map<std::pair<int, int>, std::deque<Message>> links;
  std::map<uintptr_t, std::list<Message>> arrived;  // by the receiver's handle
  std::map<uintptr_t, std::list<Pointer>> receives;
  std::set<std::pair<int, int>> failed;  // rank, and the peer of which it has heard that it is dead
  std::set<int> dead;
  int truncated = 0;  // messages that were longer than their receive
};
World world;

int rank_of(uintptr_t communicator, int index) {
  return world.communicators.at(communicator / kRanks).at(static_cast<size_t>(index));
}
int own_rank(uintptr_t communicator) { return rank_of(communicator, static_cast<int>(communicator % kRanks)); }

Pointer& held(void* request) { return **static_cast<Pointer**>(request); }
void hold(void* request, Pointer pointer) {
  auto* const kept = new Pointer(std::move(pointer));
  std::memcpy(request, &kept, sizeof kept);
}
void let_go(void* request) {
  Pointer* kept;
  std::memcpy(&kept, request, sizeof kept);
  delete kept;
  std::memset(request, 0, sizeof kept);
}

void take(Request& receive, const Message& message) {
  receive.truncated = message.data.size() > receive.room;
  world.truncated += receive.truncated;
  if (!receive.truncated) std::memcpy(receive.target, message.data.data(), message.data.size());
  receive.bytes = static_cast<int>(message.data.size());
  receive.done = true;
  if (message.sender) message.sender->done = true;
}

int send(const void* data, int count, int to, int tag, uintptr_t communicator, void* request, bool waits) {
  auto sent = std::make_shared<Request>();
  sent->own = own_rank(communicator);
  sent->peer = rank_of(communicator, to);
  if (world.failed.contains({sent->own, sent->peer})) return kFailed;
  sent->done = !waits;
  const auto* const bytes = static_cast<const std::byte*>(data);
  if (!world.dead.contains(sent->peer)) {
    const uintptr_t receiver = communicator / kRanks * kRanks + static_cast<uintptr_t>(to);
    world.links[{sent->own, sent->peer}].push_back(
        {receiver, static_cast<int>(communicator % kRanks), tag, {bytes, bytes + count}, waits ? sent : nullptr});
  }
  hold(request, std::move(sent));
  return 0;
}

}  // namespace

extern "C" {

void simulated_reset() { world = {}; }

void simulated_communicator(uintptr_t number, const int* ranks, int count) {
  world.communicators[number] = {ranks, ranks + count};
}

// Fills in sender and receiver of each link on which something travels, and returns how many there are.
int simulated_links(int* pairs, int most) {
  int count = 0;
  for (const auto& [link, messages] : world.links) {
    if (messages.empty() || count == most) continue;
    pairs[2 * count] = link.first;
    pairs[2 * count + 1] = link.second;
    ++count;
  }
  return count;
}

// The first message between two ranks arrives.
void simulated_arrive(int from, int to) {
  auto& messages = world.links.at({from, to});
  Message message = std::move(messages.front());
  messages.pop_front();
  if (world.dead.contains(to)) return;
  auto& receives = world.receives[message.communicator];
  const auto found = std::ranges::find_if(
      receives, [&](const Pointer& receive) { return receive->from == message.from && receive->tag == message.tag; });
  if (found == receives.end()) {
    world.arrived[message.communicator].push_back(std::move(message));
  } else {
    take(**found, message);
    receives.erase(found);
  }
}

// What travels between two ranks is lost.
void simulated_drop(int from, int to) { world.links[{from, to}].clear(); }

void simulated_die(int rank) { world.dead.insert(rank); }

// MPI tells a rank that another one is dead.
void simulated_fail(int rank, int peer) { world.failed.insert({rank, peer}); }

int simulated_truncated() { return world.truncated; }

int MPI_Isend(const void* data, int count, uintptr_t, int to, int tag, uintptr_t communicator, void* request) {
  return send(data, count, to, tag, communicator, request, false);
}
int MPI_Issend(const void* data, int count, uintptr_t, int to, int tag, uintptr_t communicator, void* request) {
  return send(data, count, to, tag, communicator, request, true);
}
int MPI_Irecv(void* data, int room, uintptr_t, int from, int tag, uintptr_t communicator, void* request) {
  auto receive = std::make_shared<Request>();
  *receive = {.own = own_rank(communicator),
              .peer = rank_of(communicator, from),
              .target = data,
              .room = static_cast<size_t>(room),
              .from = from,
              .tag = tag,
              .communicator = communicator};
  if (world.failed.contains({receive->own, receive->peer})) return kFailed;
  auto& arrived = world.arrived[communicator];
  const auto found =
      std::ranges::find_if(arrived, [&](const Message& message) { return message.from == from && message.tag == tag; });
  if (found == arrived.end()) {
    world.receives[communicator].push_back(receive);
  } else {
    take(*receive, *found);
    arrived.erase(found);
  }
  hold(request, std::move(receive));
  return 0;
}
int MPI_Test(void* request, int* flag, void* status) {
  const Request& its = *held(request);
  *flag = its.done;
  if (!its.done) return world.failed.contains({its.own, its.peer}) ? kFailed : 0;
  const bool truncated = its.truncated;
  std::memcpy(status, &its.bytes, sizeof its.bytes);
  let_go(request);
  if (truncated) return kTruncated;
  return 0;
}
int MPI_Cancel(void* request) {
  Request& its = *held(request);
  if (its.target == nullptr || its.done) return 0;
  world.receives[its.communicator].remove_if([&](const Pointer& receive) { return receive.get() == &its; });
  its.done = true;
  return 0;
}
int MPI_Get_count(const void* status, uintptr_t, int* count) {
  std::memcpy(count, status, sizeof *count);
  return 0;
}
int MPI_Error_string(int code, char* text, int* length) {
  std::strcpy(text, code == kTruncated ? "message truncated" : "the peer is dead");
  *length = static_cast<int>(std::strlen(text));
  return 0;
}
int MPI_Comm_group(uintptr_t, uintptr_t*) { return kFailed; }
int MPI_Group_size(uintptr_t, int*) { return kFailed; }
int MPI_Group_translate_ranks(uintptr_t, int, const int*, uintptr_t, int*) { return kFailed; }
int MPI_Group_free(uintptr_t*) { return kFailed; }
}
