// The memory that the ranks of one host share: each rank brings a memfd of its own, which its peers map. Nothing has a
// name in the file system, so nothing is left behind by a kill and no /dev/shm limit applies; pages cost memory once
// they are touched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/doorbell.h"

namespace horovodish {

// How a rank's memfd is laid out; equal on all ranks of the host. After the header come `regions` regions, one for each
// process set that may be alive at once.
struct ArenaLayout {
  size_t ranks = 1;
  size_t chunk_bytes = 0;
  size_t slots = 0;
  size_t regions = 1;

  size_t rings_offset(size_t region) const;
  size_t counters_offset(size_t region) const;
  size_t slots_offset(size_t region) const;
  size_t region_bytes() const;
  size_t bytes() const;
};

struct RankHeader {
  alignas(64) Doorbell doorbell;
};

// A queue of bytes from one rank to another, in the sender's memory.
struct ByteRing {
  static constexpr size_t kCapacity = 1 << 16;

  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) std::byte data[kCapacity];
};

// How far a rank has come in the stream of chunks of the shared-memory plane; each counter is written by its owner
// alone.
struct StreamCounters {
  alignas(64) std::atomic<uint64_t> published;
  alignas(64) std::atomic<uint64_t> reduced;
  alignas(64) std::atomic<uint64_t> released;
};

// The memory behind a memfd, which may be closed afterwards. Throws std::system_error.
std::shared_ptr<std::byte> map_memory(int descriptor, size_t bytes);

class Arena {
 public:
  // `memory`: of every local rank, each of layout.bytes() and zeroed at first; see map_memory().
  Arena(std::vector<std::shared_ptr<std::byte>> memory, size_t own, const ArenaLayout& layout);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  size_t ranks() const { return layout_.ranks; }
  size_t own() const { return own_; }
  const ArenaLayout& layout() const { return layout_; }

  RankHeader& header(size_t rank) const { return at<RankHeader>(rank, 0); }
  ByteRing& ring(size_t region, size_t from, size_t to) const {
    return at<ByteRing>(from, layout_.rings_offset(region) + to * sizeof(ByteRing));
  }
  StreamCounters& counters(size_t region, size_t rank) const {
    return at<StreamCounters>(rank, layout_.counters_offset(region));
  }
  std::byte* slot(size_t region, size_t rank, size_t index) const {
    return memory_[rank].get() + layout_.slots_offset(region) + index * layout_.chunk_bytes;
  }
  // Makes this rank's part of a region as new. No peer may be using it.
  void clear(size_t region) const;
  // For transfers that cannot be stopped: the addresses stay valid until the process ends, with other memory behind them.
  void keep_addresses() { keeps_addresses_ = true; }

 private:
  template <class T>
  T& at(size_t rank, size_t offset) const {
    return *reinterpret_cast<T*>(memory_[rank].get() + offset);
  }

  ArenaLayout layout_;
  size_t own_;
  std::vector<std::shared_ptr<std::byte>> memory_;
  bool keeps_addresses_ = false;
};

}  // namespace horovodish
