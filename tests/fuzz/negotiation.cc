// What the ranks say to each other in a negotiation, read from any bytes: the messages of a tree's edges, given to a
// node, and the requests and farewells in them. `make fuzz` lets libFuzzer call this.
//
// The bytes are commands for one node of a tree of five ranks: rank 0 is the node, ranks 1 to 3 stand below one child and
// rank 4 is the other. Each command is a byte for what to do, and for a message one more for its length.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "negotiation/links/link.h"
#include "negotiation/negotiation.h"
#include "negotiation/request.h"

namespace {

using namespace horovodish;

class Commands {
 public:
  Commands(const uint8_t* data, size_t size) : left_(reinterpret_cast<const char*>(data), size) {}

  bool done() const { return left_.empty(); }
  unsigned byte() {
    const auto first = static_cast<unsigned char>(left_.empty() ? 0 : left_[0]);
    left_.remove_prefix(left_.empty() ? 0 : 1);
    return first;
  }
  std::string_view message() {
    const size_t length = byte();
    const std::string_view message = left_.substr(0, length);
    left_.remove_prefix(message.size());
    return message;
  }

 private:
  std::string_view left_;
};

// What a peer has written.
class Given final : public Channel {
 public:
  explicit Given(std::string_view bytes) : bytes_(bytes) {}

  size_t write(const std::byte*, size_t size, bool) override { return size; }
  size_t read(std::byte* data, size_t size) override {
    const size_t step = bytes_.copy(reinterpret_cast<char*>(data), size);
    bytes_.remove_prefix(step);
    return step;
  }

 private:
  std::string_view bytes_;
};

Request own_request(unsigned number) {
  Request request;
  request.name = std::string(1, static_cast<char>('a' + number % 3));
  request.members = {{.name = request.name, .dtype = DType::float32, .shape = {2, 3}}};
  if (number & 4) request.family.name = "f";
  if (number & 8) request.kind = Kind::broadcast;
  return request;
}

// Whoever reads a message may refuse it, by this exception and no other.
template <class Function>
bool accepts(Function function) {
  try {
    function();
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

void play(Commands commands) {
  RankSet left;
  for (const int rank : {1, 2, 3}) left.add(RankSet(WorldRank(rank)));
  const bool root = commands.byte() % 2 == 0;
  Negotiation node(root, {RankSet(WorldRank(0)), left, RankSet(WorldRank(4))}, 2);
  double now = 1;
  while (!commands.done()) {
    node.set_now(now += 0.01);
    const unsigned command = commands.byte();
    const bool accepted = accepts([&] {
      switch (command % 7) {
        case 0:
        case 1:
        case 2:
          node.from_child(1 + command % 2, commands.message());
          break;
        case 3:
        case 4:
          if (!root) node.from_parent(commands.message());
          break;
        case 5: {
          const Request request = own_request(commands.byte());
          node.submit(request.name, request.signature(), {});
          break;
        }
        default:
          node.join();
          break;
      }
    });
    if (!accepted) return;  // the rank fails
    node.describe_pending();
    node.oldest();
    node.take_for_parent();
    node.take_for_children();
    while (node.take_decision()) {
    }
  }
}

void decode(std::string_view bytes) {
  accepts([&] { Request::family_of(bytes); });
  accepts([&] {
    const Request request = Request::decode(bytes);
    for (const Member& member : request.members) member.count();
    if (Request::decode(request.signature()).signature() != request.signature()) std::abort();
    find_mismatch("a",
                  {{own_request(0).signature(), RankSet(WorldRank(0))}, {std::string(bytes), RankSet(WorldRank(1))}});
  });
}

void receive(std::string_view bytes) {
  Link link(std::make_unique<Given>(bytes));
  accepts([&] {
    link.advance();
    while (link.receive()) {
    }
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 4) {
    case 0:
      decode(rest);
      break;
    case 1:
      receive(rest);
      break;
    default:
      play(Commands(data + 1, size - 1));
  }
  return 0;
}
