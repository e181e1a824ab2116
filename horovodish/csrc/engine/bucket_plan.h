// The gradients of one optimizer, cut into buckets beforehand. A bucket is submitted as soon as all of its tensors are.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace horovodish {

class BucketPlan {
 public:
  // `members`: each tensor with the number of its bucket. `shared`: kind, name, op and scales of every bucket; the
  // number of the bucket is added to the name. `devices`: the device of each bucket's tensors, or one device for all.
  // `ends`, `compressions`: one for each bucket, see Request; or none.
  BucketPlan(Engine& engine, const Request& shared, const std::vector<std::pair<Member, size_t>>& members,
             const std::vector<int>& devices, int process_set, const std::vector<std::vector<int64_t>>& ends = {},
             const std::vector<Compression>& compressions = {});

  // Tensor `index` is ready; on a device, it is ready when `stream` reaches this point. `absent`: this rank has no
  // value for the tensor in this step, and `source` holds zeros. Any thread may call it. Throws std::out_of_range, and
  // std::logic_error if the tensor was submitted before in this step.
  void submit(size_t index, const void* source, void* target, uintptr_t stream = 0, bool absent = false);
  // The end of a step. Throws std::logic_error that names a tensor which was neither submitted nor absent.
  void flush() const;

  // Returns whether the results of a bucket are there; false if the bucket has failed. On a device, makes `stream` wait
  // for the results. Any thread may call it.
  bool arrived(size_t bucket, uintptr_t stream);
  bool settled() const;
  // Drives the engine until all buckets of the step are settled.
  bool wait(std::chrono::nanoseconds limit);
  const Error* error() const;
  // Call it after wait, on a device. `stream`, and the streams on which the tensors were handed over, wait for the
  // results.
  void order_after(uintptr_t stream) const;
  // Keeps the owner of this step's tensors alive until no submitted operation uses them. The wait may still be under
  // way.
  void keep(const std::shared_ptr<void>& owner);
  // Tensors of settled buckets that no rank had a value for.
  std::vector<size_t> absent_everywhere() const;
  // Call it after wait. True if a rank had joined, so that it does not know of this step.
  bool any_joined() const;
  // Call it after wait. The next step may begin.
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
    std::vector<uintptr_t> streams;  // on a device: the streams of its tensors, each once
    size_t missing = 0;
    std::shared_ptr<Operation> operation;  // null until submitted
    bool settled() const { return operation && operation->handle->settled(); }
    std::shared_ptr<std::vector<std::shared_ptr<void>>> owners;  // the operation's memory; empty until keep()
  };

  void begin(Bucket& bucket);
  static void order_after(const Bucket& bucket, uintptr_t stream);

  Engine& engine_;
  const int process_set_;
  std::mutex mutex_;
  std::vector<Position> positions_;  // by index
  std::vector<Bucket> buckets_;  // guarded by mutex_ until all are submitted
  size_t open_buckets_ = 0;  // guarded by mutex_
};

}  // namespace horovodish
