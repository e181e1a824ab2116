#include "negotiation/response_cache.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace horovodish {

namespace {
// Tensors that were refused are forgotten when they are this many: names may be new for ever.
constexpr size_t kRefused = 1 << 16;
}  // namespace

std::optional<ResponseCache::Id> ResponseCache::find(std::string_view name) const {
  const auto found = ids_.find(name);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const ResponseCache::Tensor* ResponseCache::find(Id id) const {
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : &found->second.tensor;
}

ResponseCache::Room ResponseCache::make_room(std::string_view name, Id& victim) {
  if (entries_.size() < capacity_) return Room::free;
  if (by_use_.empty()) return Room::none;
  const size_t key = std::hash<std::string_view>{}(name);
  victim = by_use_.front();
  if (const auto found = refused_.find(key);
      found != refused_.end() && entries_.at(victim).last_use < found->second.before) {
    refused_.erase(found);
    return Room::evict;
  }
  if (refused_.size() == kRefused) refused_.clear();
  Refused& refused = refused_[key];
  refused = {++uses_, refused.last};
  return Room::none;
}

void ResponseCache::insert(Id id, std::string_view name, std::string_view signature) {
  if (entries_.contains(id) || ids_.contains(name)) {
    throw std::runtime_error("tensor '" + std::string(name) + "' enters the response cache twice");
  }
  last_id_ = std::max(last_id_, id);
  by_use_.push_back(id);
  entries_[id] = {{std::string(name), std::string(signature)}, ++uses_, std::prev(by_use_.end())};
  ids_[std::string(name)] = id;
}

void ResponseCache::erase(Id id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  ids_.erase(found->second.tensor.name);
  by_use_.erase(found->second.place);
  entries_.erase(found);
}

void ResponseCache::touch(Id id) {
  Entry& entry = entries_.at(id);
  entry.last_use = ++uses_;
  by_use_.splice(by_use_.end(), by_use_, entry.place);
}

}  // namespace horovodish
