// Non-blocking MPI point-to-point transfers of bytes, with MPI's errors as exceptions.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "abi/mpi.h"
#include "memory/clock.h"

namespace horovodish {

// A transfer that may be under way. Its memory must stay until the transfer is done.
class MpiRequest {
 public:
  explicit MpiRequest(const abi::Mpi& mpi) : mpi_(&mpi) {
    if (mpi.request_bytes > request_.size() || mpi.status_bytes > status_.size()) {
      throw std::runtime_error("the MPI library's requests or statuses are larger than any known one's");
    }
  }

  // `sees_taken`: done only when the receiver has taken the data, and with it everything sent to it before on this
  // communicator. Otherwise done when MPI has a copy, which MPI may not have sent yet.
  void send(const void* data, size_t bytes, int to, int tag, bool sees_taken = false) {
    // Open MPI 5.0 crashes in a send to a rank that it knows to be dead.
    if (mpi_->has_died(to)) fail("sending to", to, "it has died");
    const auto begin = sees_taken ? mpi_->issend : mpi_->isend;
    check(begin(data, static_cast<int>(bytes), mpi_->byte_type, to, tag, mpi_->communicator, request_.data()),
          "sending to", to);
    start(to);
    (*mpi_->sent_bytes)[static_cast<size_t>(mpi_->world_ranks[static_cast<size_t>(to)])] += bytes;
  }
  void receive(void* data, size_t bytes, int from, int tag) {
    check(mpi_->irecv(data, static_cast<int>(bytes), mpi_->byte_type, from, tag, mpi_->communicator, request_.data()),
          "receiving from", from);
    start(from);
  }
  bool active() const { return active_; }
  // Returns true once nothing is under way.
  bool test() {
    if (!active_) return true;
    int flag = 0;
    const int code = mpi_->test(request_.data(), &flag, status_.data());
    if (code != abi::kMpiSuccess) active_ = false;
    check(code, "exchanging data with", peer_);
    active_ = flag == 0;
    return !active_;
  }
  // After a receive: how many bytes arrived.
  size_t received() const {
    int count = 0;
    check(mpi_->get_count(status_.data(), mpi_->byte_type, &count), "receiving from", peer_);
    return static_cast<size_t>(count);
  }
  // Gives up a transfer. Returns true when it has ended, which happens at once unless the peer died or stopped in the
  // middle. In that case the wait is limited, and the memory must stay until the process ends.
  bool cancel() noexcept {
    if (!active_) return true;
    mpi_->cancel(request_.data());
    int flag = 0;
    for (const auto limit = Clock::now() + std::chrono::milliseconds(100); flag == 0 && Clock::now() < limit;) {
      if (mpi_->test(request_.data(), &flag, status_.data()) != abi::kMpiSuccess) break;
    }
    active_ = false;
    return flag != 0;
  }

 private:
  void start(int peer) {
    peer_ = peer;
    active_ = true;
  }
  void check(int code, const char* what, int peer) const {
    if (code == abi::kMpiSuccess) return;
    char text[abi::kMpiMaxErrorString] = "";
    int length = 0;
    mpi_->error_string(code, text, &length);
    fail(what, peer, text);
  }
  [[noreturn]] void fail(const char* what, int peer, const char* why) const {
    throw std::runtime_error(std::string("MPI failed while ") + what + " rank " +
                             std::to_string(mpi_->world_ranks.at(static_cast<size_t>(peer))) + ": " + why);
  }

  const abi::Mpi* mpi_;
  bool active_ = false;
  int peer_ = -1;
  alignas(16) std::array<std::byte, 64> request_{};
  alignas(16) std::array<std::byte, 256> status_{};
};

}  // namespace horovodish
