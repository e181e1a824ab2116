#include "negotiation/tensor_table.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace horovodish {

namespace {
// Forget refused requests at this number: a program may use new names for ever.
constexpr size_t kRefused = 1 << 16;
// Limit of cached requests for one name. A tensor with a new shape in each step takes no more, and a search among these
// is short.
constexpr size_t kMostOfOneName = 16;
}  // namespace

CachedRequest* Tensor::find(std::string_view signature) const {
  const auto found = std::ranges::find(cached, signature, &CachedRequest::signature);
  return found == cached.end() ? nullptr : *found;
}

const Tensor* TensorTable::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &found->second;
}

CachedRequest* TensorTable::find(TensorId id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &found->second;
}

Tensor& TensorTable::at(std::string_view name) {
  if (Tensor* const known = find(name)) return *known;
  const auto added = by_name_.try_emplace(std::string(name)).first;
  added->second.name = added->first;
  return added->second;
}

void TensorTable::drop_unless_needed(Tensor& tensor) {
  if (tensor.cached.empty() && !tensor.pending.any()) by_name_.erase(by_name_.find(tensor.name));
}

Pending& TensorTable::open(Tensor& tensor) {
  if (!tensor.pending.any()) {
    tensor.pending.begin(++opened_);
    ++pending_;
  }
  return tensor.pending;
}

Tensor& TensorTable::open(std::string_view name) {
  Tensor& tensor = at(name);
  open(tensor);
  return tensor;
}

void TensorTable::close(Tensor& tensor) {
  if (tensor.pending.any()) --pending_;
  tensor.pending.end();
  drop_unless_needed(tensor);
}

std::vector<std::string> TensorTable::pending() const {
  std::map<uint64_t, std::string> by_age;
  for (const auto& [name, tensor] : by_name_) {
    if (tensor.pending.any()) by_age[tensor.pending.serial()] = name;
  }
  std::vector<std::string> names;  // clang 14, which may compile the fuzzers, does not compile std::views
  for (const auto& [serial, name] : by_age) names.push_back(name);
  return names;
}

std::optional<TensorId> TensorTable::make_room(const Tensor& tensor, std::string_view signature) {
  const bool is_full = tensor.cached.size() == kMostOfOneName;
  if (!is_full && by_id_.size() < capacity_) return kNotCached;
  if (by_use_.empty()) return std::nullopt;
  const CachedRequest& oldest =
      is_full ? **std::ranges::min_element(tensor.cached, {}, &CachedRequest::last_use) : *by_use_.front();
  const size_t key = std::hash<std::string_view>{}(signature);
  if (const auto found = refused_.find(key); found != refused_.end() && oldest.last_use < found->second.before) {
    refused_.erase(found);
    return oldest.id;
  }
  if (refused_.size() == kRefused) refused_.clear();
  Refused& refused = refused_[key];
  refused = {++uses_, refused.last};
  return std::nullopt;
}

void TensorTable::insert(TensorId id, std::string_view name, std::string_view signature) {
  Tensor& tensor = at(name);
  if (tensor.find(signature) != nullptr || by_id_.contains(id)) {
    throw std::runtime_error("tensor '" + std::string(name) + "' enters the response cache twice");
  }
  CachedRequest& request = by_id_.try_emplace(id, CachedRequest{id, std::string(signature), &tensor}).first->second;
  tensor.cached.push_back(&request);
  request.place = by_use_.insert(by_use_.end(), &request);
  request.last_use = ++uses_;
  last_id_ = std::max(last_id_, id);
}

void TensorTable::forget(CachedRequest& request) {
  Tensor& tensor = *request.tensor;
  std::erase(tensor.cached, &request);
  by_use_.erase(request.place);
  by_id_.erase(request.id);
  drop_unless_needed(tensor);
}

void TensorTable::touch(CachedRequest& request) {
  request.last_use = ++uses_;
  by_use_.splice(by_use_.end(), by_use_, request.place);
}

}  // namespace horovodish
