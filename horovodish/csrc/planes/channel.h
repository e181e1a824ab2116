// Bytes in order between this rank and another one of its process set, both ways, without ever blocking.
#pragma once

#include <algorithm>
#include <cstddef>

#include "memory/arena.h"

namespace horovodish {

class Channel {
 public:
  virtual ~Channel() = default;
  // Move up to `size` bytes and return how many it were; 0 when nothing has been moved yet. A transfer of this memory may then be
  // under way, so the next call must name the same memory and size.
  virtual size_t write(const std::byte* data, size_t size) = 0;
  virtual size_t read(std::byte* data, size_t size) = 0;
  // Ends what is under way. False if the memory may be read and written for as long as the process lives.
  virtual bool cancel() noexcept { return true; }
};

// Between two ranks of one host.
class SharedMemoryChannel : public Channel {
 public:
  // `peer`: local rank at the other end.
  SharedMemoryChannel(Arena& arena, size_t region, size_t peer)
      : out_(arena.transfer_ring(region, arena.own(), peer)),
        in_(arena.transfer_ring(region, peer, arena.own())),
        peer_(arena.doorbell(peer)) {}

  size_t write(const std::byte* data, size_t size) override {
    return in_pieces(size, [&](size_t begin, size_t count) { return out_.write(data + begin, count, peer_); });
  }
  size_t read(std::byte* data, size_t size) override {
    return in_pieces(size, [&](size_t begin, size_t count) { return in_.read(data + begin, count, peer_); });
  }

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

  TransferRing& out_;
  TransferRing& in_;
  Doorbell& peer_;
};

}  // namespace horovodish
