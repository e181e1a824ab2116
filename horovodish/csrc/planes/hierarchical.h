// The plane of several hosts with several ranks each. Allreduce and broadcast go through the stream of the
// shared-memory plane, in which every local rank drives the ring of its own shard; Adasum, which needs every rank's values
// in the end, and collectives that send different data to different ranks gain nothing from a detour through a neighbour and
// go straight between all ranks.
#pragma once

#include <memory>

#include "planes/mpi/mpi_ring.h"
#include "planes/shared_memory/shared_memory.h"

namespace horovodish {

class HierarchicalPlane : public Plane {
 public:
  HierarchicalPlane(std::unique_ptr<SharedMemoryPlane> stream, std::unique_ptr<MpiRingPlane> direct)
      : stream_(std::move(stream)), direct_(std::move(direct)) {}

  void start(std::shared_ptr<Operation> operation) override {
    const Request& request = *operation->request;
    const bool in_stream =
        request.kind == Kind::broadcast || (request.kind == Kind::allreduce && request.op != ReduceOp::adasum);
    Plane& plane = in_stream ? static_cast<Plane&>(*stream_) : *direct_;
    plane.start(std::move(operation));
  }
  Progress advance() override {
    const Progress stream = stream_->advance(), direct = direct_->advance();
    if (stream == Progress::progressed || direct == Progress::progressed) return Progress::progressed;
    return stream == Progress::pending || direct == Progress::pending ? Progress::pending : Progress::done;
  }
  bool needs_polling() const override { return true; }

 private:
  std::unique_ptr<SharedMemoryPlane> stream_;
  std::unique_ptr<MpiRingPlane> direct_;
};

}  // namespace horovodish
