// Ranks as threads of one process over one mapping, for the sanitizers, which cannot see across processes.
#pragma once

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

namespace horovodish {

// The objects that the ranks of one host share.
class Host {
 public:
  static constexpr size_t kChunkBytes = 16 << 10;

  explicit Host(int ranks) : ranks_(ranks), sockets_(n(), std::vector<int>(n(), -1)) {
    for (size_t rank = 0; rank < n(); ++rank) {
      const int descriptor = memfd_create("ranks", MFD_CLOEXEC);
      const auto bytes = EngineConfig::arena_layout(n(), kChunkBytes).bytes();
      CHECK(descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes)) == 0);
      memory_.push_back(map_memory(descriptor, bytes));
      close(descriptor);
    }
    for (size_t a = 0; a < n(); ++a) {
      for (size_t b = a + 1; b < n(); ++b) {
        int pair[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        sockets_[a][b] = pair[0];
        sockets_[b][a] = pair[1];
      }
    }
  }

  EngineConfig config(int rank) const {
    EngineConfig config;
    config.rank = WorldRank(rank);
    config.size = ranks_;
    config.local_rank = static_cast<size_t>(rank);
    config.local_size = n();
    config.arena_memory = memory_;
    config.peer_sockets = sockets_[config.local_rank];
    config.options = {kChunkBytes, 1 << 19, 100, std::chrono::microseconds(20)};
    return config;
  }
  // A process set of all ranks, by default the global one.
  ProcessSetConfig everybody(int rank, size_t region = 0) const {
    ProcessSetConfig config;
    config.own = rank;
    config.region = region;
    config.hosts.resize(1);
    for (int i = 0; i < ranks_; ++i) {
      config.ranks.push_back(WorldRank(i));
      config.hosts[0].push_back(i);
      config.local.push_back(static_cast<size_t>(i));
    }
    return config;
  }
  const std::vector<std::shared_ptr<std::byte>>& memory() const { return memory_; }
  // Acts as the end of the rank's process would.
  void end(int rank) const {
    for (const int socket : sockets_[static_cast<size_t>(rank)]) {
      if (socket >= 0) shutdown(socket, SHUT_RDWR);
    }
  }

 private:
  size_t n() const { return static_cast<size_t>(ranks_); }

  const int ranks_;
  std::vector<std::shared_ptr<std::byte>> memory_;
  std::vector<std::vector<int>> sockets_;
};

inline std::shared_ptr<Operation> operation(Engine& engine, Kind kind, const std::string& name,
                                            const std::vector<float>& source, std::vector<float>* target, int root = 0,
                                            ReduceOp op = ReduceOp::sum, uint32_t tag = 0) {
  auto request = std::make_shared<Request>();
  request->kind = kind;
  request->name = name;
  request->root = WorldRank(root);
  request->op = op;
  request->tag = tag;
  std::vector<Buffer> buffers;
  add_member(*request, buffers, {name, DType::float32, {static_cast<int64_t>(source.size())}},
             {reinterpret_cast<const std::byte*>(source.data()),
              target == nullptr ? nullptr : reinterpret_cast<std::byte*>(target->data())});
  return operation_of(std::move(request), std::move(buffers), 0, engine.make_handle());
}

inline void wait(Engine& engine, const std::shared_ptr<Handle>& handle) {
  while (!engine.wait(*handle, std::chrono::milliseconds(20))) {
  }
}

}  // namespace horovodish
