#include "tensorflow/work.h"

#include <numeric>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace horovodish::tensorflow {

namespace {

const EngineInterface* engine_of_python = nullptr;

std::byte no_elements;

}  // namespace

std::byte* memory_of(const TensorPtr& tensor) {
  void* data = TF_TensorData(tensor.get());
  return data != nullptr ? static_cast<std::byte*>(data) : &no_elements;
}

void connect(const EngineInterface* interface) { engine_of_python = interface; }
const EngineInterface& engine() { return *engine_of_python; }

TF_Code code_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::mismatch:
    case ErrorKind::bad_argument:
      return TF_INVALID_ARGUMENT;
    case ErrorKind::stalled:
      return TF_DEADLINE_EXCEEDED;
    case ErrorKind::engine_stopped:
      return TF_CANCELLED;
    case ErrorKind::internal:
    case ErrorKind::rank_lost:  // not unavailable: TensorFlow keeps that for its own network, and replaces it
      return TF_INTERNAL;
    case ErrorKind::duplicate_name:
    case ErrorKind::forked_process:
      break;
  }
  return TF_FAILED_PRECONDITION;
}

std::string message_of(const Error& error) { return std::string(class_name(error.kind)) + ": " + error.message; }

Work::Work(const Submission& call, TF_OpKernelContext* context, Results results, Status& status)
    : kind_(call.request.kind), any_rows_(call.request.any_rows()), results_(results), submission_(call) {
  std::vector<std::string> names;  // of the members, each followed by its label; empty where they have none
  read_name(context, names, status);
  const bool has_splits = kind_ == Kind::alltoall;
  const int tensors = TF_NumInputs(context) - 1 - (has_splits ? 1 : 0);
  Request& request = submission_.request;
  names.resize(status.ok() ? 2 * static_cast<size_t>(tensors) : 0);
  for (int i = 0; i < tensors && status.ok(); ++i) {
    const auto& [source, target] = tensors_.emplace_back(read_tensors(context, i, status));
    if (!status.ok()) return;
    const auto index = static_cast<size_t>(i);
    const TensorPtr& input = source ? source : target;
    const std::string& name = names[2 * index];
    request.members.push_back({name.empty() ? member_name(request.name, index, static_cast<size_t>(tensors)) : name,
                               dtype_of(TF_TensorType(input.get())), dims_of(input.get()), names[2 * index + 1]});
    submission_.buffers.push_back({memory_of(input), target ? memory_of(target) : nullptr});
  }
  if (has_splits && status.ok()) read_splits(context, tensors + 1, status);
}

void Work::read_name(TF_OpKernelContext* context, std::vector<std::string>& names, Status& status) {
  const TensorPtr name = input(context, 0, status);
  if (!status.ok()) return;
  const std::string_view text(static_cast<const char*>(TF_TensorData(name.get())), TF_TensorByteSize(name.get()));
  const size_t end = text.find('\n');
  Request& request = submission_.request;
  request.name = text.substr(end + 1);
  std::istringstream fields(std::string(text.substr(0, end)));
  std::getline(fields, request.family.name, '\t');
  std::getline(fields, submission_.compared, '\t');
  for (std::string field; std::getline(fields, field, '\t');) names.push_back(std::move(field));
  if (kind_ == Kind::join) request.family = {};  // the join is about ranks, not about an operation of its name
  if (!request.family.name.empty()) request.family.run = TF_StepId(context);
}

void Work::read_splits(TF_OpKernelContext* context, int index, Status& status) {
  const TensorPtr splits = input(context, index, status);
  if (!status.ok()) return;
  const auto* numbers = static_cast<const int64_t*>(TF_TensorData(splits.get()));
  submission_.splits.assign(numbers, numbers + TF_TensorElementCount(splits.get()));
}

Work::Tensors Work::read_tensors(TF_OpKernelContext* context, int index, Status& status) const {
  Tensors tensors{input(context, index + 1, status), nullptr};
  if (!status.ok() || any_rows_) return tensors;
  std::vector<int64_t> dims = dims_of(tensors.source.get());
  if (kind_ == Kind::reducescatter && !dims.empty()) {
    const RankInGroup place = engine().place(submission_.process_set);
    const int64_t ranks = place.size > 0 ? place.size : 1;
    dims[0] = dims[0] / ranks + (place.rank < dims[0] % ranks ? 1 : 0);
  }
  const int rank = static_cast<int>(dims.size());
  const TF_DataType type = TF_TensorType(tensors.source.get());
  if (results_ == Results::held) {
    TF_AllocatorAttributes on_host{sizeof(TF_AllocatorAttributes), 1};
    tensors.target.reset(TF_AllocateTemp(context, type, dims.data(), rank, &on_host, status.get()));
  } else {
    // An output can take over an input's memory if nobody else refers to it, this function included.
    tensors.source.reset();
    const int candidate = index + 1;
    const int candidates = kind_ == Kind::reducescatter ? 0 : 1;
    int forwarded = -1;
    tensors.target.reset(TF_ForwardInputOrAllocateOutput(context, &candidate, candidates, index, dims.data(), rank,
                                                         &forwarded, status.get()));
    if (status.ok() && forwarded < 0) tensors.source = input(context, index + 1, status);
  }
  return tensors;
}

void Work::finish(TF_OpKernelContext* context, const Handle& handle, Status& status) const {
  if (any_rows_) {
    set_rows(context, handle, status);
  } else if (kind_ == Kind::join) {
    set_output(context, 0, TF_INT32, {}, &handle.last_joined, sizeof handle.last_joined, status);
  } else if (results_ == Results::held) {
    for (size_t i = 0; i < tensors_.size() && status.ok(); ++i) {
      TF_SetOutput(context, static_cast<int>(i), tensors_[i].target.get(), status.get());
    }
  }
}

void Work::set_rows(TF_OpKernelContext* context, const Handle& handle, Status& status) const {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const Handle::Output& output = handle.outputs[i];
    std::vector<int64_t> dims = dims_of(tensors_[i].source.get());
    dims[0] = std::accumulate(output.rows.begin(), output.rows.end(), int64_t{0});
    const TF_DataType type = TF_TensorType(tensors_[i].source.get());
    set_output(context, i, type, dims, output.data.get(), output.bytes, status);
    const size_t ranks = output.rows.size();
    set_output(context, tensors_.size() + i, TF_INT64, {static_cast<int64_t>(ranks)}, output.rows.data(),
               ranks * sizeof(int64_t), status);
  }
}

}  // namespace horovodish::tensorflow
