// A channel between two hosts. Written bytes are cut into segments. The reader names as much memory as the writer, or
// at least a segment. MPI copies a single segment, so its send needs no receive. Of several segments, the first one
// waits until it is received: otherwise MPI would hold all of a large tensor in the receiver's memory. The others
// follow without a question for each.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "negotiation/links/channel.h"
#include "negotiation/links/mpi_requests.h"

namespace horovodish {

class MpiChannel : public Channel {
 public:
  // `mpi` must outlive the channel. `peer`: rank in its communicator.
  MpiChannel(const abi::Mpi& mpi, int peer, int tag, size_t segment_bytes)
      : peer_(peer), tag_(tag), segment_bytes_(segment_bytes), sends_(mpi), receives_(mpi) {}

  size_t write(const std::byte* data, size_t size, bool last) override {
    const bool asks = last || (!receiver_is_ready_ && size > segment_bytes_);
    const MpiRequest* const ended = move(
        sends_, size, asks ? 1 : kTransfers,
        [&](MpiRequest& request, size_t begin, size_t bytes) { request.send(data + begin, bytes, peer_, tag_, asks); });
    if (ended == nullptr) return 0;
    receiver_is_ready_ = segment_bytes_ < size;
    return std::min(segment_bytes_, size);
  }
  size_t read(std::byte* data, size_t size) override {
    const MpiRequest* const ended = move(
        receives_, size, kTransfers,
        [&](MpiRequest& request, size_t begin, size_t bytes) { request.receive(data + begin, bytes, peer_, tag_); });
    return ended == nullptr ? 0 : ended->received();
  }
  bool cancel() noexcept override {
    bool stopped = !is_broken_;  // after an error, MPI may still use the memory
    // MPI cannot cancel a send.
    for (const MpiRequest& request : sends_.requests) stopped &= !request.active();
    for (MpiRequest& request : receives_.requests) stopped &= request.cancel();
    receives_.ended = receives_.begun;
    return stopped;
  }

 private:
  static constexpr size_t kTransfers = 4;  // under way in each direction

  struct Direction {
    explicit Direction(const abi::Mpi& mpi) : requests(kTransfers, MpiRequest(mpi)) {}

    std::vector<MpiRequest> requests;  // segment i uses entry i modulo the size
    uint64_t begun = 0, ended = 0;
  };

  // The first transfer under way, if it has ended; else null.
  template <class Begin>
  const MpiRequest* move(Direction& direction, size_t size, size_t most, Begin begin) {
    if (is_broken_) return nullptr;
    is_broken_ = true;  // if MPI throws
    for (size_t under_way = direction.begun - direction.ended; under_way < most; ++under_way) {
      const size_t at = under_way * segment_bytes_;
      if (at >= size) break;
      begin(direction.requests[direction.begun % kTransfers], at, std::min(segment_bytes_, size - at));
      ++direction.begun;
    }
    MpiRequest& first = direction.requests[direction.ended % kTransfers];
    const bool has_ended = first.test();
    is_broken_ = false;
    if (!has_ended) return nullptr;
    ++direction.ended;
    return &first;
  }

  const int peer_, tag_;
  const size_t segment_bytes_;
  Direction sends_, receives_;
  bool receiver_is_ready_ = false;  // for the other segments of the current write
  bool is_broken_ = false;
};

}  // namespace horovodish
