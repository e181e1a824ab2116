// The collectives of the MPI plane: a schedule, the memory that it runs on, and what comes before and after.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "fusion.h"
#include "planes/mpi_ring.h"

namespace horovodish {

struct MpiEnvironment {
  const abi::Mpi& mpi;
  int rank, ranks;
  int tag;
  size_t segment_bytes;
};

// Executes a schedule on a buffer.
class ScheduleRun {
 public:
  // `reduce_into(range, incoming, count, finish)` combines a received range; needed where the schedule reduces.
  using ReduceInto = std::function<void(std::byte* range, const std::byte* incoming, size_t count, bool finish)>;

  // `buffer` takes what is received; what is sent is read from `sent`, or from `buffer` too when that is null.
  ScheduleRun(const MpiEnvironment& environment, Schedule schedule, std::byte* buffer, size_t item_bytes,
              ReduceInto reduce_into = nullptr, const std::byte* sent = nullptr);
  bool advance();
  bool done() const {
    return sends_done_ == schedule_.sends.size() && receives_done_ == schedule_.receives.size();
  }
  void cancel_receives() noexcept;

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

  const MpiEnvironment environment_;
  const Schedule schedule_;
  std::byte* const buffer_;
  const std::byte* const sent_;
  const size_t item_;
  const ReduceInto reduce_into_;
  std::vector<Transfer> sends_, receives_;  // transfer i of the schedule uses entry i modulo the size
  size_t sends_started_ = 0, sends_done_ = 0, receives_posted_ = 0, receives_done_ = 0;
};

// The task of an operation; null where deciding the operation was all there was to do.
std::unique_ptr<MpiTask> make_mpi_task(const std::shared_ptr<Operation>& operation, const MpiEnvironment& environment);

}  // namespace horovodish
