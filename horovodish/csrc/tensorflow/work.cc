#include "tensorflow/work.h"

#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace horovodish::tensorflow {

namespace {

const c_interface::Table* engine_table = nullptr;

std::byte no_elements;

}  // namespace

void* memory_of(const TensorPtr& tensor) {
  void* data = TF_TensorData(tensor.get());
  return data != nullptr ? data : &no_elements;
}

void connect(const c_interface::Table* table) { engine_table = table; }
const c_interface::Table& engine() { return *engine_table; }

TF_Code code_of(const std::string& error_class) {
  if (error_class == "MismatchError" || error_class == "ValueError") return TF_INVALID_ARGUMENT;
  if (error_class == "StallError") return TF_DEADLINE_EXCEEDED;
  if (error_class == "EngineStoppedError") return TF_CANCELLED;
  // Not unavailable, which TensorFlow keeps for its own network and replaces.
  if (error_class == "HorovodInternalError" || error_class == "RankLostError") return TF_INTERNAL;
  return TF_FAILED_PRECONDITION;
}

std::string message_of(const c_interface::Outcome& outcome) {
  return std::string(outcome.error_class) + ": " + outcome.message;
}

Work::Work(const Attributes& attributes, TF_OpKernelContext* context, Results results, Status& status)
    : attributes_(attributes), results_(results), step_(TF_StepId(context)) {
  read_name(context, status);
  const bool has_splits = attributes_.call.kind == Kind::alltoall;
  const int tensors = TF_NumInputs(context) - 1 - (has_splits ? 1 : 0);
  members_.reserve(static_cast<size_t>(tensors));
  for (int i = 0; i < tensors && status.ok(); ++i) members_.push_back(read_member(context, i, status));
  if (has_splits && status.ok()) read_splits(context, tensors + 1, status);
}

void Work::read_name(TF_OpKernelContext* context, Status& status) {
  const TensorPtr name = input(context, 0, status);
  if (!status.ok()) return;
  const std::string_view text(static_cast<const char*>(TF_TensorData(name.get())), TF_TensorByteSize(name.get()));
  const size_t end = text.find('\n');
  name_ = text.substr(end + 1);
  std::istringstream fields(std::string(text.substr(0, end)));
  std::getline(fields, family_, '\t');
  std::getline(fields, compared_, '\t');
  for (std::string field; std::getline(fields, field, '\t');) names_.push_back(std::move(field));
}

void Work::read_splits(TF_OpKernelContext* context, int index, Status& status) {
  const TensorPtr splits = input(context, index, status);
  if (!status.ok()) return;
  const auto* numbers = static_cast<const int64_t*>(TF_TensorData(splits.get()));
  splits_.assign(numbers, numbers + TF_TensorElementCount(splits.get()));
}

Work::Member Work::read_member(TF_OpKernelContext* context, int index, Status& status) const {
  Member member;
  member.source = input(context, index + 1, status);
  if (!status.ok()) return member;
  member.dims = dims_of(member.source.get());
  if (attributes_.any_rows()) return member;
  auto dims = member.dims;
  if (attributes_.call.kind == Kind::reducescatter && !dims.empty()) {
    const c_interface::RankInGroup place = engine().place(attributes_.call.process_set);
    const int64_t ranks = place.size > 0 ? place.size : 1;
    dims[0] = dims[0] / ranks + (place.rank < dims[0] % ranks ? 1 : 0);
  }
  const int rank = static_cast<int>(dims.size());
  const TF_DataType type = TF_TensorType(member.source.get());
  if (results_ == Results::held) {
    TF_AllocatorAttributes on_host{sizeof(TF_AllocatorAttributes), 1};
    member.target.reset(TF_AllocateTemp(context, type, dims.data(), rank, &on_host, status.get()));
  } else {
    // An input can be taken over while nobody else refers to it, this function included.
    member.source.reset();
    const int candidate = index + 1;
    const int candidates = attributes_.call.kind == Kind::reducescatter ? 0 : 1;
    int forwarded = -1;
    member.target.reset(TF_ForwardInputOrAllocateOutput(context, &candidate, candidates, index, dims.data(), rank,
                                                        &forwarded, status.get()));
    if (status.ok() && forwarded < 0) member.source = input(context, index + 1, status);
  }
  return member;
}

void Work::submit(void (*then)(void* owner, const c_interface::Outcome*), std::shared_ptr<void> owner) const {
  std::vector<c_interface::Tensor> tensors;
  tensors.reserve(members_.size());
  const auto text = [&](size_t index) { return index < names_.size() ? names_[index].c_str() : nullptr; };
  for (const Member& member : members_) {
    const size_t place = 2 * tensors.size();
    const TensorPtr& source = member.source ? member.source : member.target;
    tensors.push_back({memory_of(source), member.target ? memory_of(member.target) : nullptr,
                       dtype_of(TF_TensorType(source.get())), static_cast<int>(member.dims.size()), member.dims.data(),
                       text(place), text(place + 1)});
  }
  c_interface::Submission submission = attributes_.call;
  submission.name = name_.c_str();
  submission.family = family_.empty() ? nullptr : family_.c_str();
  submission.run = step_;
  submission.ranks = attributes_.ranks.c_str();
  submission.tensors = tensors.data();
  submission.tensor_count = tensors.size();
  submission.splits = splits_.empty() ? nullptr : splits_.data();
  submission.split_count = splits_.size();
  submission.compared = compared_.empty() ? nullptr : compared_.c_str();
  submission.codec = attributes_.codec.c_str();
  using Owner = std::shared_ptr<void>;
  engine().submit(&submission, then, [](void* its) { delete static_cast<Owner*>(its); }, new Owner(std::move(owner)));
}

void Work::finish(TF_OpKernelContext* context, const c_interface::Outcome& outcome, Status& status) {
  if (attributes_.any_rows()) {
    set_rows(context, outcome, status);
  } else if (attributes_.call.kind == Kind::join) {
    const TensorPtr last(TF_AllocateOutput(context, 0, TF_INT32, nullptr, 0, sizeof(int32_t), status.get()));
    if (status.ok()) *static_cast<int32_t*>(TF_TensorData(last.get())) = outcome.last_joined;
  } else if (results_ == Results::held) {
    for (size_t i = 0; i < members_.size() && status.ok(); ++i) {
      TF_SetOutput(context, static_cast<int>(i), members_[i].target.get(), status.get());
    }
  }
}

void Work::set_rows(TF_OpKernelContext* context, const c_interface::Outcome& outcome, Status& status) const {
  const auto copy = [&](size_t index, TF_DataType type, const std::vector<int64_t>& dims, const void* data,
                        size_t bytes) {
    if (!status.ok()) return;
    const TensorPtr output(TF_AllocateOutput(context, static_cast<int>(index), type, dims.data(),
                                             static_cast<int>(dims.size()), bytes, status.get()));
    if (status.ok() && bytes > 0) std::memcpy(TF_TensorData(output.get()), data, bytes);
  };
  for (size_t i = 0; i < members_.size(); ++i) {
    const c_interface::Output& rows = outcome.outputs[i];
    std::vector<int64_t> dims = members_[i].dims;
    dims[0] = 0;
    for (size_t rank = 0; rank < rows.ranks; ++rank) dims[0] += rows.rows[rank];
    copy(i, TF_TensorType(members_[i].source.get()), dims, rows.data, rows.bytes);
    const auto ranks = static_cast<int64_t>(rows.ranks);
    copy(members_.size() + i, TF_INT64, {ranks}, rows.rows, rows.ranks * sizeof(int64_t));
  }
}

}  // namespace horovodish::tensorflow
