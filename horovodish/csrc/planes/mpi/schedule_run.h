// Executes a schedule over MPI.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "negotiation/links/mpi_requests.h"
#include "planes/mpi/schedule.h"

namespace horovodish {

// Work between hosts: a state machine that never waits.
class MpiTask {
 public:
  virtual ~MpiTask() = default;
  // Returns true if something moved.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // Returns whether it records its phases in the timeline itself.
  virtual bool records_phases() const { return false; }
  // After this, nothing is written any more, and the task never completes.
  virtual void cancel_receives() noexcept = 0;
};

struct MpiEnvironment {
  const abi::Mpi& mpi;
  std::vector<int> peers;  // the participating ranks, by their ranks in the communicator
  int rank;                // this one's index among them
  int tag;
  size_t segment_bytes;

  int ranks() const { return static_cast<int>(peers.size()); }
};

// A schedule on a buffer.
class ScheduleRun : public MpiTask {
 public:
  // `reduce_into(range, incoming, count, finish)` combines a received range. Needed if the schedule reduces.
  using ReduceInto = std::function<void(std::byte* range, const std::byte* incoming, size_t count, bool finish)>;

  // `buffer` takes the received data. Sends read from `sent`, or from `buffer` if `sent` is null. `then` is called
  // once, when everything has been sent and received.
  ScheduleRun(const MpiEnvironment& environment, Schedule schedule, std::byte* buffer, size_t item_bytes,
              ReduceInto reduce_into = nullptr, const std::byte* sent = nullptr, std::function<void()> then = nullptr);
  bool advance() override;
  bool done() const override {
    return sends_done_ == schedule_.sends.size() && receives_done_ == schedule_.receives.size();
  }
  void cancel_receives() noexcept override;

 private:
  struct Transfer {
    MpiRequest request;
    std::vector<std::byte> staging;  // for a receive that is reduced
  };
  bool post_receive();
  bool finish_receive();
  bool start_send();
  bool finish_send();
  std::byte* at(size_t element) const { return buffer_ + element * item_; }
  int peer(int index) const { return environment_.peers[static_cast<size_t>(index)]; }

  const MpiEnvironment environment_;
  const Schedule schedule_;
  std::byte* const buffer_;
  const std::byte* const sent_;
  const size_t item_;
  const ReduceInto reduce_into_;
  std::function<void()> then_;  // empty after its call
  std::vector<Transfer> sends_, receives_;  // transfer i of the schedule uses entry i modulo the size
  size_t sends_started_ = 0, sends_done_ = 0, receives_posted_ = 0, receives_done_ = 0;
};

}  // namespace horovodish
