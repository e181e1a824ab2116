// Bytes in order between this rank and another one of its process set, both ways, without ever blocking.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "memory/arena.h"

namespace horovodish {

class Channel {
 public:
  virtual ~Channel() = default;
  // Move up to `size` bytes and return how many were moved; 0 if nothing has been moved yet. A transfer of this memory
  // may then be under way, so the next call must name the same memory and size. `last`: count bytes as moved only when
  // the peer has taken them.
  virtual size_t write(const std::byte* data, size_t size, bool last = false) = 0;
  virtual size_t read(std::byte* data, size_t size) = 0;
  // Ends the transfers under way. Returns false if MPI may read and write the memory until the process ends.
  virtual bool cancel() noexcept { return true; }
  // Wakes the peer's engine even if it has nothing under way.
  virtual void nudge() {}
};

// Between two ranks of one host: a ring in the shared memory of each.
template <class Ring>
class SharedMemoryChannel : public Channel {
 public:
  // `sent_bytes`: counts the written bytes.
  SharedMemoryChannel(Ring& out, Ring& in, Doorbell& peer, uint64_t& sent_bytes)
      : out_(out), in_(in), peer_(peer), sent_bytes_(sent_bytes) {}

  size_t write(const std::byte* data, size_t size, bool) override {
    const size_t written =
        in_pieces(size, [&](size_t begin, size_t count) { return out_.write(data + begin, count, peer_); });
    sent_bytes_ += written;
    return written;
  }
  size_t read(std::byte* data, size_t size) override {
    return in_pieces(size, [&](size_t begin, size_t count) { return in_.read(data + begin, count, peer_); });
  }
  void nudge() override { peer_.ring_own(); }

 private:
  // The peer reads a piece while this rank writes the next one.
  static constexpr size_t kPiece = 16 << 10;

  static constexpr size_t kMost = 64 << 10;  // before the collectives have their turn

  template <class Move>
  static size_t in_pieces(size_t size, Move move) {
    size_t moved = 0;
    while (moved < std::min(size, kMost)) {
      const size_t step = move(moved, std::min(size - moved, kPiece));
      if (step == 0) break;
      moved += step;
    }
    return moved;
  }

  Ring& out_;
  Ring& in_;
  Doorbell& peer_;
  uint64_t& sent_bytes_;
};

}  // namespace horovodish
