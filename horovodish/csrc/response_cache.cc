#include "response_cache.h"

#include <iterator>

namespace horovodish {

namespace {
// An entry may be evicted once this many times the capacity was used without it: several steps of any model that fits.
constexpr uint64_t kIdleCapacities = 4;
}  // namespace

std::optional<ResponseCache::Id> ResponseCache::find(std::string_view name) const {
  const auto found = ids_.find(std::string(name));
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

const std::string* ResponseCache::signature(Id id) const {
  const auto found = entries_.find(id);
  return found == entries_.end() ? nullptr : &found->second.signature;
}

ResponseCache::Room ResponseCache::make_room(Id& victim) {
  ++uses_;
  if (entries_.size() < capacity_) return Room::free;
  if (by_use_.empty()) return Room::none;
  victim = by_use_.front();
  return uses_ - entries_.at(victim).last_use > kIdleCapacities * capacity_ ? Room::evict : Room::none;
}

void ResponseCache::insert(Id id, std::string_view name, std::string_view signature) {
  by_use_.push_back(id);
  entries_[id] = {std::string(name), std::string(signature), ++uses_, std::prev(by_use_.end())};
  ids_[std::string(name)] = id;
}

void ResponseCache::erase(Id id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  ids_.erase(found->second.name);
  by_use_.erase(found->second.place);
  entries_.erase(found);
}

void ResponseCache::touch(Id id) {
  Entry& entry = entries_.at(id);
  entry.last_use = ++uses_;
  by_use_.splice(by_use_.end(), by_use_, entry.place);
}

}  // namespace horovodish
