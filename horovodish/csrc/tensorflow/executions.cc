#include "tensorflow/executions.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tensorflow/callback.h"

namespace horovodish::tensorflow {

namespace {

constexpr const char* kGivenUp = "given up, because of an operation of the same step: ";

// An operation under way. TensorFlow waits for its callback, and the engine uses its memory.
struct Execution {
  Execution(const Submission& call, TF_OpKernelContext* its_context, TF_AsyncOpKernelDoneCallback* callback,
            Status& status)
      : context(its_context),
        step(TF_StepId(its_context)),
        done(callback),
        work(call, its_context, Work::Results::outputs, status) {}

  void conclude(const Status* failure) {
    if (failure != nullptr) TF_OpKernelContext_Failure(context, failure->get());
    done();
  }

  TF_OpKernelContext* const context;  // not used after done()
  const int64_t step;
  const Callback done;
  Work work;
};

// The error of the step's other operations. It has the code of the first error: a TensorFlow session recovers from some
// codes, such as TF_ABORTED, and would begin anew on this rank alone.
Status for_others(const Error& error) { return {code_of(error.kind), (kGivenUp + message_of(error)).c_str()}; }

// The operations under way of each step; a step is one call of a function. When one operation fails, TensorFlow starts
// no more operations of the step, but waits for those that it has started. Another rank may have started others, so
// some would wait for ever. They all fail with the first one. The engine may still use their memory, but nobody reads
// it any more.
class Steps {
 public:
  // Returns the error of the step if it failed while `execution` was started; none if the step goes on.
  std::optional<Error> add(const std::shared_ptr<Execution>& execution) {
    std::lock_guard lock(mutex_);
    const auto failed =
        std::find_if(failed_.begin(), failed_.end(), [&](const auto& each) { return each.first == execution->step; });
    if (failed != failed_.end()) return failed->second;
    by_step_[execution->step].insert(execution);
    return std::nullopt;
  }

  // Returns false if it has failed with another operation.
  bool remove(const std::shared_ptr<Execution>& execution) {
    std::lock_guard lock(mutex_);
    const auto found = by_step_.find(execution->step);
    if (found == by_step_.end() || found->second.erase(execution) == 0) return false;
    if (found->second.empty()) by_step_.erase(found);
    return true;
  }

  // The other operations of its step.
  std::unordered_set<std::shared_ptr<Execution>> fail(int64_t step, const Error& reason) {
    std::lock_guard lock(mutex_);
    failed_.emplace_back(step, reason);
    if (failed_.size() > kRemembered) failed_.pop_front();
    auto node = by_step_.extract(step);
    return node.empty() ? std::unordered_set<std::shared_ptr<Execution>>{} : std::move(node.mapped());
  }

 private:
  static constexpr size_t kRemembered = 64;  // each is needed for as long as a kernel takes to start

  std::mutex mutex_;
  std::unordered_map<int64_t, std::unordered_set<std::shared_ptr<Execution>>> by_step_;  // guarded by mutex_
  std::deque<std::pair<int64_t, Error>> failed_;  // the last failed steps; guarded by mutex_
};

Steps& steps() {
  static auto* const all = new Steps;  // operations may settle while the process ends
  return *all;
}

void settle_execution(const std::shared_ptr<Execution>& execution, const Handle& handle) {
  if (!steps().remove(execution)) return;
  const Error* const error = handle.error();
  if (error == nullptr) {
    Status status;
    execution->work.finish(execution->context, handle, status);
    execution->conclude(status.ok() ? nullptr : &status);
    return;
  }
  const auto others = steps().fail(execution->step, *error);
  const Status failure(code_of(error->kind), message_of(*error).c_str());
  execution->conclude(&failure);
  const Status given_up = for_others(*error);
  for (const auto& other : others) other->conclude(&given_up);
}

}  // namespace

void fail(TF_OpKernelContext* context, TF_Code code, const std::string& message) {
  Status status(code, message.c_str());
  TF_OpKernelContext_Failure(context, status.get());
}

void run(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* callback) {
  // Python asks this beforehand, but not for graphs that sessions run: see library.py.
  static const bool keepable = looks_like_ours(callback);
  if (!keepable) {
    fail(context, TF_FAILED_PRECONDITION,
         "this TensorFlow was compiled for another C++ library than libstdc++, so sessions cannot run collectives. "
         "Remedy: call them eagerly or in a tf.function.");
    TF_RunAsyncOpKernelDoneCallback(callback);
    return;
  }
  Status status;
  const auto execution =
      std::make_shared<Execution>(*static_cast<const Submission*>(kernel), context, callback, status);
  if (!status.ok()) {
    execution->conclude(&status);
    return;
  }
  if (const auto reason = steps().add(execution)) {
    const Status given_up = for_others(*reason);
    execution->conclude(&given_up);
    return;
  }
  execution->work.submit(execution, [execution](const auto& handle) { settle_execution(execution, *handle); });
}

}  // namespace horovodish::tensorflow
