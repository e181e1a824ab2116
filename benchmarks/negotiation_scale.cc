// Negotiates among many ranks in one thread and tells what it costs rank 0, for negotiation_scale.py.
//
//     negotiation_scale RANKS RANKS_PER_HOST TENSORS CAPACITY STEPS PER_TURN
//
// Every rank submits all tensors in each step, PER_TURN of them between two looks at its messages: as many as there are
// when a step's tensors become ready together, 1 when they become ready one after the other. One line for each step:
// messages and bytes that rank 0 receives, that it sends, microseconds of this thread's CPU time that it works, bytes of memory
// that its negotiation holds, and how many messages one after another lead from the farthest rank to it.
#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "negotiation/negotiation.h"
#include "negotiation/request.h"
#include "negotiation/tree.h"

using namespace horovodish;

namespace {

double cpu_us() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

bool counts_memory = false;  // rank 0 works
int64_t held_bytes = 0;

struct Cost {
  uint64_t messages_in = 0, bytes_in = 0, messages_out = 0, bytes_out = 0;
  double cpu_us = 0;
};

struct Node {
  TreeNode tree;
  int depth = 0;
  std::unique_ptr<Negotiation> negotiation;
  std::deque<std::pair<size_t, std::string>> inbox;  // by participant, 0 for the parent
};

class World {
 public:
  World(int ranks, int ranks_per_host, size_t capacity) {
    std::vector<std::vector<int>> hosts;
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank % ranks_per_host == 0) hosts.emplace_back();
      hosts.back().push_back(rank);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      Node& node = nodes_.emplace_back();
      node.tree = tree_node(hosts, rank);
      if (node.tree.parent) node.depth = nodes_[static_cast<size_t>(*node.tree.parent)].depth + 1;
      depth_ = std::max(depth_, node.depth);
      std::vector<RankSet> participants{RankSet(WorldRank(rank))};
      for (const int child : node.tree.children) {
        RankSet& below = participants.emplace_back();
        for (const int one : subtree(hosts, child)) below.add(RankSet(WorldRank(one)));
      }
      counts_memory = rank == 0;
      node.negotiation = std::make_unique<Negotiation>(rank == 0, std::move(participants), capacity);
      counts_memory = false;
    }
  }

  int depth() const { return depth_; }

  // Every rank submits all tensors; returns when all are decided everywhere.
  Cost step(const std::vector<Request>& tensors, const std::vector<std::string>& signatures, size_t per_turn) {
    cost_ = {};
    decided_.assign(nodes_.size(), 0);
    empties_caches_ = per_turn >= tensors.size();
    for (size_t begin = 0; begin < tensors.size(); begin += per_turn) {
      const size_t end = std::min(begin + per_turn, tensors.size());
      // From the leaves up, so that a node finds what its children have said.
      for (size_t rank = nodes_.size(); rank-- > 0;) {
        turn(rank, [&](Negotiation& negotiation) {
          for (size_t i = begin; i < end; ++i) negotiation.submit(tensors[i].name, signatures[i], {});
        });
      }
      while (std::any_of(nodes_.begin(), nodes_.end(), [](const Node& node) { return !node.inbox.empty(); })) {
        for (size_t rank = 0; rank < nodes_.size(); ++rank) turn(rank, [](Negotiation&) {});
      }
    }
    const auto all = [&](size_t decided) { return decided == tensors.size(); };
    if (!std::all_of(decided_.begin(), decided_.end(), all)) std::abort();
    return cost_;
  }

 private:
  // As ProcessSet::turn().
  template <class Submit>
  void turn(size_t rank, Submit submit) {
    Node& node = nodes_[rank];
    const auto inbox = std::exchange(node.inbox, {});
    if (rank == 0 && empties_caches_) std::fill(evicting_.begin(), evicting_.end(), ++evictions_);
    counts_memory = rank == 0;
    const double started = rank == 0 ? cpu_us() : 0;
    submit(*node.negotiation);
    for (const auto& [participant, message] : inbox) {
      if (participant == 0) {
        node.negotiation->from_parent(message);
      } else {
        node.negotiation->from_child(participant, message);
      }
    }
    const std::string up = node.negotiation->take_for_parent(), down = node.negotiation->take_for_children();
    while (const auto decision = node.negotiation->take_decision()) {
      if (std::holds_alternative<DecidedCollective>(*decision)) ++decided_[rank];
    }
    counts_memory = false;
    if (rank == 0) count(inbox, down, cpu_us() - started);
    if (!up.empty()) post_up(rank, up);
    if (down.empty()) return;
    for (const int child : node.tree.children) nodes_[static_cast<size_t>(child)].inbox.emplace_back(0, down);
  }

  void post_up(size_t rank, const std::string& message) {
    Node& parent = nodes_[static_cast<size_t>(*nodes_[rank].tree.parent)];
    const auto& siblings = parent.tree.children;
    const auto place = std::find(siblings.begin(), siblings.end(), static_cast<int>(rank)) - siblings.begin();
    parent.inbox.emplace_back(static_cast<size_t>(place) + 1, message);
  }

  void count(const std::deque<std::pair<size_t, std::string>>& inbox, const std::string& down, double cpu_us) {
    const uint64_t children = nodes_[0].tree.children.size();
    cost_.messages_in += inbox.size();
    for (const auto& [participant, message] : inbox) cost_.bytes_in += message.size();
    cost_.messages_out += down.empty() ? 0 : children;
    cost_.bytes_out += down.size() * children;
    cost_.cpu_us += cpu_us;
  }

  std::vector<Node> nodes_;
  int depth_ = 0;
  std::vector<size_t> decided_;  // in this step, by rank
  Cost cost_;
  // Between two steps a training empties the caches; here only the other ranks do, the more the more they are.
  bool empties_caches_ = false;
  std::vector<char> evicting_ = std::vector<char>(64 << 20);
  char evictions_ = 0;
};

}  // namespace

// Counts what rank 0 allocates while it works. The other ranks never free memory of its negotiation, nor it theirs, but for messages.
void* operator new(size_t bytes) {
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) std::abort();
  if (counts_memory) held_bytes += static_cast<int64_t>(malloc_usable_size(memory));
  return memory;
}
void operator delete(void* memory) noexcept {
  if (counts_memory) held_bytes -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: negotiation_scale RANKS RANKS_PER_HOST TENSORS CAPACITY STEPS PER_TURN\n");
    return 2;
  }
  const auto argument = [&](int i) { return static_cast<size_t>(std::atoi(argv[i])); };
  World world(std::atoi(argv[1]), std::atoi(argv[2]), argument(4));
  std::vector<Request> tensors(argument(3));
  std::vector<std::string> signatures;
  constexpr Kind kKinds[] = {Kind::allreduce, Kind::broadcast, Kind::reducescatter, Kind::allgather};
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].kind = kKinds[i % std::size(kKinds)];
    tensors[i].name = "encoder.layers." + std::to_string(i) + ".self_attention.weight";
    tensors[i].members = {{tensors[i].name, DType::float32, {512, 512}}};
    signatures.push_back(tensors[i].signature());
  }
  for (size_t step = 0; step < argument(5); ++step) {
    const Cost cost = world.step(tensors, signatures, argument(6));
    std::printf("%zu %zu %zu %zu %.1f %lld %d\n", cost.messages_in, cost.bytes_in, cost.messages_out, cost.bytes_out,
                cost.cpu_us, static_cast<long long>(held_bytes), world.depth());
  }
}
