// A link between two hosts: MPI messages with a tag of their own.
#pragma once

#include <algorithm>
#include <vector>

#include "links/link.h"
#include "mpi_requests.h"

namespace horovodish {

class MpiLink : public Link {
 public:
  // `mpi` must outlive the link.
  MpiLink(const abi::Mpi& mpi, int peer, int generation)
      : peer_(peer), tag_(MpiTags(generation).control()), send_(mpi), receive_(mpi), out_(kBlock), in_(kBlock) {}
  ~MpiLink() override {
    receive_.cancel();
    send_.cancel();
  }

 protected:
  size_t write_some(const char* data, size_t size) override {
    if (!send_.test()) return 0;
    const size_t count = std::min(size, out_.size());
    std::copy_n(data, count, out_.begin());
    send_.send(out_.data(), count, peer_, tag_);
    return count;
  }
  size_t read_some(char* data, size_t size) override {
    if (taken_ == received_) {
      if (!receive_.active()) receive_.receive(in_.data(), in_.size(), peer_, tag_);
      if (!receive_.test()) return 0;
      received_ = receive_.received();
      taken_ = 0;
    }
    const size_t count = std::min(size, received_ - taken_);
    std::copy_n(in_.begin() + static_cast<std::ptrdiff_t>(taken_), count, data);
    taken_ += count;
    return count;
  }
  bool flushed() override { return send_.test(); }

 private:
  static constexpr size_t kBlock = 32 << 10;

  const int peer_, tag_;
  MpiRequest send_, receive_;
  std::vector<char> out_, in_;
  size_t received_ = 0, taken_ = 0;  // bytes of in_
};

}  // namespace horovodish
