// A link between two hosts: MPI messages with a tag of their own.
#pragma once

#include <algorithm>
#include <memory>

#include "abi/mpi_requests.h"
#include "negotiation/links/link.h"

namespace horovodish {

class MpiLink : public Link {
 public:
  // `mpi` must outlive the link.
  MpiLink(const abi::Mpi& mpi, int peer) : peer_(peer), tag_(mpi.tags.control()), send_(mpi), receive_(mpi) {}
  ~MpiLink() override {
    if (!receive_.cancel()) static_cast<void>(in_.release());
    // A farewell has to reach its peer even if the peer has not taken it yet.
    if (leaves() ? send_.active() : !send_.cancel()) static_cast<void>(out_.release());
  }

 protected:
  size_t write_some(const char* data, size_t size) override {
    if (!send_.test()) return 0;
    const size_t count = std::min(size, kBlock);
    std::copy_n(data, count, out_.get());
    if (leaves()) {
      send_.send_and_see_taken(out_.get(), count, peer_, tag_);
    } else {
      send_.send(out_.get(), count, peer_, tag_);
    }
    return count;
  }
  size_t read_some(char* data, size_t size) override {
    if (taken_ == received_) {
      if (!receive_.active()) receive_.receive(in_.get(), kBlock, peer_, tag_);
      if (!receive_.test()) return 0;
      received_ = receive_.received();
      taken_ = 0;
    }
    const size_t count = std::min(size, received_ - taken_);
    std::copy_n(in_.get() + taken_, count, data);
    taken_ += count;
    return count;
  }
  bool flushed() override { return send_.test(); }

 private:
  static constexpr size_t kBlock = 32 << 10;

  const int peer_, tag_;
  MpiRequest send_, receive_;
  std::unique_ptr<char[]> out_ = std::make_unique_for_overwrite<char[]>(kBlock);
  std::unique_ptr<char[]> in_ = std::make_unique_for_overwrite<char[]>(kBlock);
  size_t received_ = 0, taken_ = 0;  // bytes of in_
};

}  // namespace horovodish
