// A link between two ranks of one host: a ring of bytes in each one's shared memory.
#pragma once

#include <algorithm>

#include "memory/arena.h"
#include "negotiation/links/link.h"

namespace horovodish {

class SharedMemoryLink : public Link {
 public:
  // `peer`: local rank at the other end.
  SharedMemoryLink(Arena& arena, size_t region, size_t peer)
      : out_(arena.ring(region, arena.own(), peer)),
        in_(arena.ring(region, peer, arena.own())),
        peer_(arena.header(peer).doorbell) {}

  void nudge() override { peer_.ring_own(); }

 protected:
  size_t write_some(const char* data, size_t size) override {
    const uint64_t written = out_.written.load(std::memory_order_relaxed);
    const uint64_t read = out_.read.load(std::memory_order_acquire);
    const size_t count = std::min(size, ByteRing::kCapacity - static_cast<size_t>(written - read));
    if (count == 0) return 0;
    const size_t at = written % ByteRing::kCapacity;
    const size_t before_end = std::min(count, ByteRing::kCapacity - at);
    std::memcpy(out_.data + at, data, before_end);
    std::memcpy(out_.data, data + before_end, count - before_end);
    out_.written.store(written + count, std::memory_order_release);
    peer_.ring();
    return count;
  }
  size_t read_some(char* data, size_t size) override {
    const uint64_t read = in_.read.load(std::memory_order_relaxed);
    const uint64_t written = in_.written.load(std::memory_order_acquire);
    const size_t count = std::min(size, static_cast<size_t>(written - read));
    if (count == 0) return 0;
    const size_t at = read % ByteRing::kCapacity;
    const size_t before_end = std::min(count, ByteRing::kCapacity - at);
    std::memcpy(data, in_.data + at, before_end);
    std::memcpy(data + before_end, in_.data, count - before_end);
    in_.read.store(read + count, std::memory_order_release);
    // Only a writer that found the ring full waits for this.
    if (written - read == ByteRing::kCapacity) peer_.ring();
    return count;
  }
  bool flushed() override { return true; }

 private:
  ByteRing& out_;
  ByteRing& in_;
  Doorbell& peer_;
};

}  // namespace horovodish
