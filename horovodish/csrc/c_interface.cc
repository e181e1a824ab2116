#include "c_interface.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/executions.h"
#include "engine/frontend.h"

namespace horovodish::c_interface {

namespace {

// Not the first one: a script may have variables that it broadcasts after its first step.
constexpr uint64_t kComparedExecution = 2;

using Then = void (*)(void* argument, const Outcome*);

void report_error(const char* error_class, const char* message, Then then, void* argument) {
  Outcome outcome;
  outcome.error_class = error_class;
  outcome.message = message;
  then(argument, &outcome);
}

void report(const Handle& handle, Then then, void* argument) {
  if (const Error* error = handle.error()) {
    return report_error(class_name(error->kind), error->message.c_str(), then, argument);
  }
  Outcome outcome;
  std::vector<Output> outputs;
  for (const Handle::Output& output : handle.outputs) {
    outputs.push_back({output.data.get(), output.bytes, output.rows.data(), output.rows.size()});
  }
  outcome.outputs = outputs.data();
  outcome.output_count = outputs.size();
  outcome.last_joined = handle.last_joined;
  then(argument, &outcome);
}

// As text, since what users pass may add up to more than a number holds.
std::string sum_of(const std::vector<int64_t>& splits) {
  int64_t sum = 0;
  for (const int64_t split : splits) {
    if (__builtin_add_overflow(sum, split, &sum)) return "more than 64 bits hold";
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

// What is wrong with a submission on this rank alone; empty when nothing is.
std::string problem(const Submission& submission, const std::vector<int64_t>& splits,
                    const horovodish::RankInGroup& place) {
  const Kind kind = submission.kind;
  const bool has_rows = kind == Kind::allgather || kind == Kind::alltoall || kind == Kind::reducescatter;
  for (size_t i = 0; i < submission.tensor_count; ++i) {
    if (has_rows && submission.tensors[i].dimensions == 0)
      return "a tensor of zero dimensions has no rows; pass one with a dimension";
  }
  if (kind != Kind::alltoall) return {};
  const int64_t rows = submission.tensors[0].dims[0];
  if (divide(rows, splits, place.size)) return {};
  if (submission.split_count == 0) {
    return std::to_string(rows) + " rows cannot be divided evenly by " + std::to_string(place.size) +
           " ranks; pass splits, one number per rank";
  }
  return "splits must be " + std::to_string(place.size) + " non-negative numbers, one per rank, that add up to the " +
         std::to_string(rows) + " rows of the tensor; there are " + std::to_string(splits.size()) +
         ", and they add up to " + sum_of(splits);
}

std::vector<int64_t> splits_of(const Submission& submission, const horovodish::RankInGroup& place) {
  if (submission.kind != Kind::alltoall || submission.tensors[0].dimensions == 0) return {};
  if (submission.split_count > 0) return {submission.splits, submission.splits + submission.split_count};
  return std::vector<int64_t>(static_cast<size_t>(place.size), submission.tensors[0].dims[0] / place.size);
}

// A join is about ranks, not about an operation of its name.
Family family_of(const Submission& submission) {
  if (submission.family == nullptr || submission.kind == Kind::join) return {};
  return {submission.family, 0, 0, submission.run};
}

void hand_over(Engine& engine, const Submission& submission, const horovodish::RankInGroup& place, Then then,
               const std::shared_ptr<void>& owner) {
  const std::string name = submission.name;
  // A graph outlives the sets that it was traced for, and their numbers are used again. Number 0 always stands for all ranks.
  if (submission.process_set != 0 && submission.ranks != place.ranks) {
    throw std::invalid_argument(name + ": it was traced for a process set of the ranks " + submission.ranks +
                                ", and that number now stands for " + place.ranks +
                                ". Remedy: trace it again after init(): make a new tf.function");
  }
  const std::vector<int64_t> splits = splits_of(submission, place);
  if (submission.root >= engine.size()) {
    throw std::invalid_argument(name + ": root_rank=" + std::to_string(submission.root) +
                                " does not exist: the ranks are 0 to " + std::to_string(engine.size() - 1));
  }
  const std::string wrong = problem(submission, splits, place);
  if (!wrong.empty()) throw std::invalid_argument(name + ": " + wrong);
  auto request = std::make_shared<Request>();
  request->kind = submission.kind;
  request->name = name;
  request->op = submission.op;
  request->prescale = submission.prescale;
  request->postscale = submission.postscale;
  request->root = WorldRank(submission.root);
  request->family = family_of(submission);
  request->compression = compression_of(submission.codec);
  std::vector<Buffer> buffers;
  buffers.reserve(submission.tensor_count);
  request->members.reserve(submission.tensor_count);
  for (size_t i = 0; i < submission.tensor_count; ++i) {
    const Tensor& tensor = submission.tensors[i];
    add_member(*request, buffers,
               {tensor.name != nullptr ? tensor.name : member_name(name, i, submission.tensor_count),
                tensor.dtype,
                {tensor.dims, tensor.dims + tensor.dimensions},
                tensor.label != nullptr ? tensor.label : ""},
               {static_cast<const std::byte*>(tensor.source), static_cast<std::byte*>(tensor.target), splits});
  }
  horovodish::submit(
      engine, std::move(request), std::move(buffers), submission.process_set, owner,
      [then, owner](const Handle& handle) { report(handle, then, owner.get()); }, 0, true);
}

void submit(const Submission* submission, Then then, void (*let_go)(void*), void* argument) {
  const std::string name = submission->name;
  std::unique_ptr<void, void (*)(void*)> unshared(argument, let_go);
  std::shared_ptr<void> owner;
  try {
    owner = std::move(unshared);
    const auto engine = running_engine();
    const horovodish::RankInGroup place = engine->place(submission->process_set);
    if (place.rank < 0) {
      throw std::invalid_argument(name + ": " + text_of(engine->rank()) + " is not in process set " +
                                  std::to_string(submission->process_set) +
                                  ", or the set is not in use. Make the call on its ranks only");
    }
    if (submission->compared != nullptr) {
      engine->begin_step();
      const std::string key = std::to_string(submission->process_set) + " " + name;
      count_execution(key, kComparedExecution, submission->compared, [] { return std::vector<uintptr_t>(); });
    }
    try {
      hand_over(*engine, *submission, place, then, owner);
    } catch (const EngineStopped&) {
      throw;
    } catch (const std::exception& error) {
      // The other ranks may wait for this operation.
      engine->refuse(submission->kind, name, submission->process_set, error.what(), family_of(*submission));
      throw;
    }
  } catch (const EngineError& error) {
    report_error(class_name(error.kind()), error.what(), then, argument);
  } catch (const std::invalid_argument& error) {
    report_error("ValueError", error.what(), then, argument);
  } catch (const std::exception& error) {
    report_error(class_name(ErrorKind::internal), error.what(), then, argument);
  }
}

RankInGroup place(int process_set) {
  try {
    const auto engine = running_engine();
    const horovodish::RankInGroup known = process_set == kThisHost ? engine->local_place() : engine->place(process_set);
    return {known.rank, known.size, engine->horovods_gradients()};
  } catch (const EngineStopped&) {
    return {};
  }
}

}  // namespace

const Table& table() {
  static constexpr Table kTable{&submit, &place};
  return kTable;
}

}  // namespace horovodish::c_interface
