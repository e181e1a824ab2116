// Tests of the negotiation's links that need no MPI. The exit status is 0 if all is well.
#include "negotiation/links/link.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "negotiation/links/mpi_requests.h"

using namespace horovodish;

namespace {

int wrong = 0;

void expect(bool is_true, const char* what) {
  if (is_true) return;
  std::fprintf(stderr, "%s\n", what);
  ++wrong;
}

// The other end gives bytes in pieces.
class Pieces : public Channel {
 public:
  std::string incoming;
  size_t piece = 1;

  size_t write(const std::byte*, size_t size, bool) override { return size; }
  size_t read(std::byte* data, size_t size) override {
    const size_t count = std::min({size, piece, incoming.size()});
    std::memcpy(data, incoming.data(), count);
    incoming.erase(0, count);
    piece -= count;
    return count;
  }
};

// Half a message has always arrived.
void memory_of_what_was_received() {
  constexpr uint32_t kLength = 1000;
  auto channel = std::make_unique<Pieces>();
  Pieces& peer = *channel;
  Link link(std::move(channel));
  std::string message(kLength, 'm');
  message.insert(0, reinterpret_cast<const char*>(&kLength), sizeof kLength);
  peer.incoming = message;
  peer.piece = message.size() / 2;
  link.advance();
  for (int round = 0; round < 2000; ++round) {
    peer.incoming += message;
    peer.piece = message.size();
    link.advance();
    const auto received = link.receive();
    expect(received == std::string(kLength, 'm'), "a message is not what was sent");
    expect(!link.receive(), "half a message counts as a whole one");
  }
  expect(link.incoming_.capacity() < 200 * message.size(), "a link keeps what it has read");
}

int sends = 0;
int send(const void*, int, abi::MpiHandle, int, int, abi::MpiHandle, void*) {
  ++sends;
  return abi::kMpiSuccess;
}

// Open MPI 5.0 crashes when it sends to a rank that it knows to be dead.
void nothing_is_sent_to_the_dead() {
  abi::Mpi mpi;
  std::vector<uint64_t> sent_bytes(8);
  mpi.world_ranks = {4, 7};
  mpi.sent_bytes = &sent_bytes;
  mpi.tolerates_faults = true;
  mpi.isend = mpi.issend = send;
  mpi.get_failed_ = [](abi::MpiHandle, abi::MpiHandle* group) {
    *group = 1;
    return abi::kMpiSuccess;
  };
  mpi.comm_group_ = mpi.get_failed_;
  mpi.group_size_ = [](abi::MpiHandle, int* size) {
    *size = 1;
    return abi::kMpiSuccess;
  };
  mpi.translate_ranks_ = [](abi::MpiHandle, int, const int*, abi::MpiHandle, int* translated) {
    *translated = 0;
    return abi::kMpiSuccess;
  };
  mpi.group_free_ = [](abi::MpiHandle*) { return abi::kMpiSuccess; };
  for (const bool is_farewell : {false, true}) {
    std::string text;
    MpiRequest request(mpi);
    try {
      request.send("", 0, 1, 0, is_farewell);
    } catch (const std::runtime_error& error) {
      text = error.what();
    }
    expect(text == "MPI failed while sending to rank 7: it has died", "a send to a dead rank is not refused");
  }
  expect(sends == 0, "something was sent to a dead rank");
}

}  // namespace

int main() {
  memory_of_what_was_received();
  nothing_is_sent_to_the_dead();
  return wrong == 0 ? 0 : 1;
}
