#include "engine_interface.h"

#include <stdexcept>
#include <utility>

#include "engine/executions.h"
#include "engine/frontend.h"

namespace horovodish {

namespace {

// The second execution, not the first: a script may broadcast variables after its first step.
constexpr uint64_t kComparedExecution = 2;

// The sum as text, since the user's numbers may add up to more than 64 bits.
std::string sum_of(const std::vector<int64_t>& splits) {
  int64_t sum = 0;
  for (const int64_t split : splits) {
    if (__builtin_add_overflow(sum, split, &sum)) return "more than 64 bits can hold";
  }
  return std::to_string(sum);
}

bool divide(int64_t rows, const std::vector<int64_t>& splits, int ranks) {
  if (splits.size() != static_cast<size_t>(ranks)) return false;
  for (const int64_t split : splits) {
    if (split < 0 || split > rows) return false;
    rows -= split;
  }
  return rows == 0;
}

// Why this rank cannot submit, whatever the other ranks do; empty if it can.
std::string problem(const Submission& submission, const std::vector<int64_t>& splits, const RankInGroup& place) {
  const Request& request = submission.request;
  const bool has_rows = request.any_rows() || request.kind == Kind::reducescatter;
  for (const Member& member : request.members) {
    if (has_rows && member.shape.empty()) return "a tensor of zero dimensions has no rows; pass one with a dimension";
  }
  if (request.kind != Kind::alltoall) return {};
  const int64_t rows = request.members[0].shape[0];
  if (divide(rows, splits, place.size)) return {};
  if (submission.splits.empty()) {
    return std::to_string(rows) + " rows cannot be divided evenly by " + std::to_string(place.size) +
           " ranks; pass splits, one number per rank";
  }
  return "splits must be " + std::to_string(place.size) + " non-negative numbers, one per rank, that add up to the " +
         std::to_string(rows) + " rows of the tensor; there are " + std::to_string(splits.size()) +
         ", and they add up to " + sum_of(splits);
}

std::vector<int64_t> splits_of(const Submission& submission, const RankInGroup& place) {
  const Request& request = submission.request;
  if (request.kind != Kind::alltoall || request.members[0].shape.empty()) return {};
  if (!submission.splits.empty()) return submission.splits;
  return std::vector<int64_t>(static_cast<size_t>(place.size), request.members[0].shape[0] / place.size);
}

void hand_over(Engine& engine, Submission& submission, const RankInGroup& place, std::shared_ptr<void> memory,
               const Then& then) {
  const std::string& name = submission.request.name;
  // A graph outlives the process sets that it was traced for, and set numbers are reused. Number 0 always stands for
  // all ranks.
  if (submission.process_set != 0 && submission.ranks != place.ranks) {
    throw std::invalid_argument(name + ": the function was traced for a process set of the ranks " + submission.ranks +
                                ", and that number now stands for " + place.ranks +
                                ". Remedy: make a new tf.function after init()");
  }
  const std::vector<int64_t> splits = splits_of(submission, place);
  const int root = number_of(submission.request.root);
  if (root >= engine.size()) {
    throw std::invalid_argument(name + ": root_rank=" + std::to_string(root) + " does not exist: the ranks are 0 to " +
                                std::to_string(engine.size() - 1));
  }
  const std::string wrong = problem(submission, splits, place);
  if (!wrong.empty()) throw std::invalid_argument(name + ": " + wrong);
  std::vector<Member> members = std::exchange(submission.request.members, {});
  auto request = std::make_shared<Request>(std::move(submission.request));
  request->compression = compression_of(submission.codec);
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < members.size(); ++i) {
    submission.buffers[i].rows = splits;
    add_member(*request, buffers, std::move(members[i]), std::move(submission.buffers[i]));
  }
  submit(engine, std::move(request), std::move(buffers), submission.process_set, std::move(memory), then, 0, true);
}

void fail(ErrorKind kind, const std::exception& error, const Then& then) {
  const auto handle = std::make_shared<Handle>(0);
  handle->fail({kind, error.what()});
  then(handle);
}

class RunningEngine final : public EngineInterface {
 public:
  void submit(Submission submission, std::shared_ptr<void> memory, Then then) const noexcept override {
    const Kind kind = submission.request.kind;
    const std::string name = submission.request.name;
    const Family family = submission.request.family;
    const int process_set = submission.process_set;
    try {
      const auto engine = running_engine();
      const RankInGroup place = engine->place(process_set);
      if (place.rank < 0) {
        throw std::invalid_argument(name + ": " + text_of(engine->rank()) + " is not in process set " +
                                    std::to_string(process_set) +
                                    ", or the set is not in use. Remedy: make the call only on the ranks of the set");
      }
      if (!submission.compared.empty()) {
        engine->begin_step();
        const std::string key = std::to_string(process_set) + " " + name;
        count_execution(key, kComparedExecution, submission.compared, [] { return std::vector<uintptr_t>(); });
      }
      try {
        hand_over(*engine, submission, place, std::move(memory), then);
      } catch (const EngineStopped&) {
        throw;
      } catch (const std::exception& error) {
        // The other ranks may wait for this operation.
        engine->refuse(kind, name, process_set, error.what(), family);
        throw;
      }
    } catch (const EngineError& error) {
      fail(error.kind(), error, then);
    } catch (const std::invalid_argument& error) {
      fail(ErrorKind::bad_argument, error, then);
    } catch (const std::exception& error) {
      fail(ErrorKind::internal, error, then);
    }
  }

  RankInGroup place(int process_set) const noexcept override {
    try {
      const auto engine = running_engine();
      return process_set == kThisHost ? engine->local_place() : engine->place(process_set);
    } catch (const EngineStopped&) {
      return {};
    }
  }

  bool horovods_gradients() const noexcept override {
    try {
      return running_engine()->horovods_gradients();
    } catch (const EngineStopped&) {
      return false;
    }
  }
};

}  // namespace

const EngineInterface& engine_interface() {
  static constexpr RunningEngine kEngine;
  return kEngine;
}

}  // namespace horovodish
