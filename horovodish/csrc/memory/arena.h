// The memory that the ranks of one host share: each rank brings a memfd, and its peers map it. The memory has no name
// in the file system, so a kill leaves nothing behind, and no /dev/shm limit applies. Pages cost memory once they are
// touched.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "memory/doorbell.h"

namespace horovodish {

// The layout of a rank's memfd, equal on all ranks of the host. After a page for the doorbell come `regions` regions,
// one for each process set that may exist at once.
struct ArenaLayout {
  size_t ranks = 1;
  size_t chunk_bytes = 0;
  size_t slots = 0;
  size_t regions = 1;

  size_t control_offset(size_t region) const;
  size_t transfers_offset(size_t region) const;
  size_t counters_offset(size_t region) const;
  size_t slots_offset(size_t region) const;
  size_t region_bytes() const;
  size_t bytes() const;
};

// A queue of bytes from one rank to another, in the sender's memory.
template <size_t capacity>
struct ByteRing {
  static constexpr size_t kCapacity = capacity;

  // Move up to `size` bytes and return how many were moved; 0 if nothing can be moved now.
  size_t write(const void* bytes, size_t size, Doorbell& reader) {
    const uint64_t written = written_bytes.load(std::memory_order_relaxed);
    const uint64_t read = read_bytes.load(std::memory_order_acquire);
    const size_t count = std::min(size, kCapacity - static_cast<size_t>(written - read));
    if (count == 0) return 0;
    const size_t at = written % kCapacity;
    const size_t before_end = std::min(count, kCapacity - at);
    std::memcpy(data + at, bytes, before_end);
    std::memcpy(data, static_cast<const std::byte*>(bytes) + before_end, count - before_end);
    written_bytes.store(written + count, std::memory_order_release);
    reader.ring();
    return count;
  }
  size_t read(void* bytes, size_t size, Doorbell& writer) {
    const uint64_t read = read_bytes.load(std::memory_order_relaxed);
    const uint64_t written = written_bytes.load(std::memory_order_acquire);
    const size_t count = std::min(size, static_cast<size_t>(written - read));
    if (count == 0) return 0;
    const size_t at = read % kCapacity;
    const size_t before_end = std::min(count, kCapacity - at);
    std::memcpy(bytes, data + at, before_end);
    std::memcpy(static_cast<std::byte*>(bytes) + before_end, data, count - before_end);
    read_bytes.store(read + count, std::memory_order_release);
    // Only a writer that found the ring full waits for this. It may have filled the ring since the look above. The
    // fences here and in Doorbell::announce() ensure that the writer sees the read, or that this rank sees the full
    // ring.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (written_bytes.load(std::memory_order_relaxed) - read == kCapacity) writer.ring();
    return count;
  }
  void clear() { written_bytes = read_bytes = 0; }

  alignas(64) std::atomic<uint64_t> written_bytes;
  alignas(64) std::atomic<uint64_t> read_bytes;
  alignas(64) std::byte data[kCapacity];
};
using ControlRing = ByteRing<64 << 10>;  // of the negotiation
// Of sends and receives. The longer it is, the less often two ranks that share a core wake each other.
using TransferRing = ByteRing<256 << 10>;

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
  // `memory`: of every local rank, layout.bytes() each, zeroed at first; see map_memory().
  Arena(std::vector<std::shared_ptr<std::byte>> memory, size_t own, const ArenaLayout& layout);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  size_t own() const { return own_; }
  const ArenaLayout& layout() const { return layout_; }

  Doorbell& doorbell(size_t rank) const { return at<Doorbell>(rank, 0); }
  ControlRing& control_ring(size_t region, size_t from, size_t to) const {
    return at<ControlRing>(from, layout_.control_offset(region) + to * sizeof(ControlRing));
  }
  TransferRing& transfer_ring(size_t region, size_t from, size_t to) const {
    return at<TransferRing>(from, layout_.transfers_offset(region) + to * sizeof(TransferRing));
  }
  StreamCounters& counters(size_t region, size_t rank) const {
    return at<StreamCounters>(rank, layout_.counters_offset(region));
  }
  std::byte* slot(size_t region, size_t rank, size_t index) const {
    return memory_[rank].get() + layout_.slots_offset(region) + index * layout_.chunk_bytes;
  }
  // Clears this rank's part of a region. No peer may be using it.
  void clear(size_t region) const;
  // For transfers that cannot be stopped: keeps the addresses valid until the process ends, with other memory behind
  // them.
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
