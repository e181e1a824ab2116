// Executes a schedule over MPI.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "negotiation/links/mpi_requests.h"
#include "planes/mpi/schedule.h"

namespace horovodish {

// Something under way between hosts; a state machine that never waits.
class MpiTask {
 public:
  virtual ~MpiTask() = default;
  // True when something moved.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // Whether it records its phases in the timeline by itself.
  virtual bool records_phases() const { return false; }
  // Nothing is written any more when this returns, and the task will not be done.
  virtual void cancel_receives() noexcept = 0;
};

struct MpiEnvironment {
  const abi::Mpi& mpi;
  std::vector<int> peers;  // the ranks that take part, by their ranks in the communicator
  int rank;                // this one's index among them
  int tag;
  size_t segment_bytes;

  int ranks() const { return static_cast<int>(peers.size()); }
};

// A schedule on a buffer.
class ScheduleRun : public MpiTask {
 public:
  // `reduce_into(range, incoming, count, finish)` combines a received range; needed where the schedule reduces.
  using ReduceInto = std::function<void(std::byte* range, const std::byte* incoming, size_t count, bool finish)>;

  // `buffer` takes what is received; what is sent is read from `sent`, or from `buffer` too when that is null. `then` is called once,
  // when everything has been sent and received.
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
    std::vector<std::byte> staging;  // of a receive that is reduced
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
  std::function<void()> then_;  // empty once it was called
  std::vector<Transfer> sends_, receives_;  // transfer i of the schedule uses entry i modulo the size
  size_t sends_started_ = 0, sends_done_ = 0, receives_posted_ = 0, receives_done_ = 0;
};

}  // namespace horovodish
