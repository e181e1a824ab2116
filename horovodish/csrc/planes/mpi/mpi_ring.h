// The plane between hosts: pipelined schedules over MPI point-to-point messages. Written on Isend, Irecv and Test
// alone, so that an operation can be watched, abandoned and interleaved with others; MPI's own collectives can do none
// of this, know no bfloat16 and count in ints.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "abi/mpi_requests.h"
#include "planes/mpi/schedule_run.h"
#include "planes/plane.h"

namespace horovodish {

class MpiRingPlane : public Plane {
 public:
  // `mpi` must outlive the plane. `segment_bytes`: of a message.
  MpiRingPlane(const abi::Mpi& mpi, int rank, int ranks, int generation, size_t segment_bytes, OnComplete on_complete);
  ~MpiRingPlane() override;

  void start(std::shared_ptr<Operation> operation) override;
  Progress advance() override;
  bool needs_polling() const override { return true; }

 private:
  struct Running {
    std::shared_ptr<Operation> operation;
    std::unique_ptr<MpiTask> task;
  };

  const abi::Mpi& mpi_;
  const int rank_;
  std::vector<int> everybody_;
  const MpiTags tags_;
  const size_t segment_bytes_;
  OnComplete on_complete_;
  std::deque<std::shared_ptr<Operation>> waiting_;
  std::deque<Running> running_;
  uint64_t started_ = 0;
};

}  // namespace horovodish
