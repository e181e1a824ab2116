// A link between two ranks of one host: a ring of bytes in each one's shared memory.
#pragma once

#include "memory/arena.h"
#include "negotiation/links/link.h"

namespace horovodish {

class SharedMemoryLink : public Link {
 public:
  // `peer`: local rank at the other end.
  SharedMemoryLink(Arena& arena, size_t region, size_t peer)
      : out_(arena.control_ring(region, arena.own(), peer)),
        in_(arena.control_ring(region, peer, arena.own())),
        peer_(arena.doorbell(peer)) {}

  void nudge() override { peer_.ring_own(); }

 protected:
  size_t write_some(const char* data, size_t size) override { return out_.write(data, size, peer_); }
  size_t read_some(char* data, size_t size) override { return in_.read(data, size, peer_); }
  bool flushed() override { return true; }

 private:
  ControlRing& out_;
  ControlRing& in_;
  Doorbell& peer_;
};

}  // namespace horovodish
