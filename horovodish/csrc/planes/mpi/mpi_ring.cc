#include "planes/mpi/mpi_ring.h"

#include <numeric>

#include "planes/mpi/mpi_tasks.h"

namespace horovodish {

namespace {
// Operations under way at once; fewer than MpiTags::kOperations, so that no two of them share a tag.
constexpr size_t kWindow = 8;
static_assert(kWindow <= MpiTags::kOperations);
}  // namespace

MpiRingPlane::MpiRingPlane(const abi::Mpi& mpi, int rank, int ranks, int generation, size_t segment_bytes,
                           OnComplete on_complete)
    : mpi_(mpi),
      rank_(rank),
      everybody_(static_cast<size_t>(ranks)),
      tags_(generation),
      segment_bytes_(segment_bytes),
      on_complete_(std::move(on_complete)) {
  std::iota(everybody_.begin(), everybody_.end(), 0);
}

// With operations under way the plane is being abandoned. A transfer with a peer that has gone or is stopped may never end,
// or go on when nobody expects it any more, so the memory that it reads or writes is left to the process's end.
MpiRingPlane::~MpiRingPlane() {
  for (Running& running : running_) {
    if (!running.task) continue;
    running.task->cancel_receives();
    running.operation->handle->abandon_memory();
    static_cast<void>(running.task.release());
  }
}

void MpiRingPlane::start(std::shared_ptr<Operation> operation) { waiting_.push_back(std::move(operation)); }

Progress MpiRingPlane::advance() {
  bool progressed = false;
  // One at a time, because it is packed here, and those that run can move in the meantime.
  if (!waiting_.empty() && running_.size() < kWindow) {
    const size_t wanted = waiting_.front()->request->segment_bytes;
    const MpiEnvironment environment{mpi_, everybody_, rank_, tags_.operation(started_++),
                                     wanted == 0 ? segment_bytes_ : wanted};
    const Trace::Span span(waiting_.front()->trace, Phase::pack);
    running_.push_back({waiting_.front(), make_mpi_task(waiting_.front(), environment)});
    waiting_.pop_front();
    progressed = true;
  }
  for (Running& running : running_) {
    if (!running.task) continue;
    Trace::Span span(running.operation->trace, Phase::exchange);
    if (running.task->advance()) {
      progressed = true;
    } else {
      span.cancel();
    }
  }
  // In order, so that the window never spans more than kWindow operations and tags.
  while (!running_.empty() && (!running_.front().task || running_.front().task->done())) {
    const std::shared_ptr<Operation> operation = std::move(running_.front().operation);
    running_.pop_front();
    on_complete_(operation);
    progressed = true;
  }
  if (progressed) return Progress::progressed;
  return running_.empty() && waiting_.empty() ? Progress::done : Progress::pending;
}

}  // namespace horovodish
