// The gradients of one optimizer, cut into buckets beforehand. A bucket is submitted as soon as all of its tensors are.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace horovodish {

class BucketPlan {
 public:
  struct PlannedMember {
    Member member;
    size_t bucket;
  };

  // `shared`: kind, name, op and scales of every bucket; the name gets the bucket's number. `devices`: of each bucket's tensors, or
  // one of all.
  BucketPlan(Engine& engine, const Request& shared, const std::vector<PlannedMember>& members,
             const std::vector<int>& devices, int process_set);

  // Tensor `index` is ready, on a device once `stream` has come this far. Any thread. Throws std::out_of_range, and
  // std::logic_error when it was submitted before.
  void submit(size_t index, const void* source, void* target, uintptr_t stream = 0);
  // Likewise, but this rank has no value for the tensor this time; `zeros` stand for it.
  void absent(size_t index, const void* zeros, void* target, uintptr_t stream = 0);
  // The end of a step: throws std::logic_error naming a tensor that was neither submitted nor absent.
  void flush() const;

  bool settled() const;
  // Drives the engine until all buckets of the step are settled.
  bool wait(std::chrono::nanoseconds limit);
  const Error* error() const;
  // After wait, on a device: makes `stream`, and those on which the tensors were handed over, wait for the results.
  void order_after(uintptr_t stream) const;
  // After wait: may MPI go on reading or writing the tensors of the step?
  bool memory_abandoned() const;
  // After wait: tensors that no rank had a value for.
  std::vector<size_t> absent_everywhere() const;
  // After wait: had a rank joined, so that it does not know of this step?
  bool any_joined() const;
  // After wait: the next step may begin.
  void reset();

  const Engine& engine() const { return engine_; }

 private:
  struct Position {
    size_t bucket, member;
  };
  struct Bucket {
    std::shared_ptr<Request> request;
    std::shared_ptr<const std::string> signature;
    std::vector<size_t> indices;  // of the plan, by member
    std::vector<Buffer> buffers;
    std::vector<bool> stated;
    std::vector<size_t> absent_members;
    std::vector<uintptr_t> streams;  // on which its tensors were handed over, each once; of a device only
    size_t missing = 0;
    std::shared_ptr<Operation> operation;  // null until submitted
  };

  void state(size_t index, Buffer buffer, bool absent, uintptr_t stream);
  void begin(Bucket& bucket);

  Engine& engine_;
  const int process_set_;
  std::mutex mutex_;
  std::vector<Position> positions_;  // by index
  std::vector<Bucket> buckets_;  // guarded by mutex_ until all are submitted
  size_t open_buckets_ = 0;  // guarded by mutex_
};

}  // namespace horovodish
