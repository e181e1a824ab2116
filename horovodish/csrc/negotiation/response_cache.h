// The signatures that all ranks have agreed upon, each under a small id, so that a tensor seen before is negotiated by
// its id alone. The coordinator decides what enters and leaves; the other ranks follow its decisions in order. An id is
// never given twice: a statement by a forgotten id means what the id stood for, see unheard.h.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace horovodish {

// So that a table with names as keys is searched without a copy of the name.
struct NameHash {
  using is_transparent = void;
  size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
};
template <class T>
using ByName = std::unordered_map<std::string, T, NameHash, std::equal_to<>>;

class ResponseCache {
 public:
  using Id = uint32_t;
  struct Tensor {
    std::string name, signature;
  };

  explicit ResponseCache(size_t capacity) : capacity_(capacity) {}

  std::optional<Id> find(std::string_view name) const;
  const Tensor* find(Id id) const;  // null when unknown
  const Tensor& at(Id id) const { return entries_.at(id).tensor; }
  size_t size() const { return entries_.size(); }

  // Coordinator, each time that a tensor is not cached: may it enter? With `evict`, after `victim` has left, which was
  // not used while this tensor was asked for three times. Whatever a training step uses in whatever order is used once
  // in between, so a working set larger than the cache keeps what it has instead of replacing all of it each step.
  enum class Room { free, evict, none };
  Room make_room(std::string_view name, Id& victim);

  Id next_id() { return ++last_id_; }
  void insert(Id id, std::string_view name, std::string_view signature);
  void erase(Id id);
  void touch(Id id);

 private:
  struct Entry {
    Tensor tensor;
    uint64_t last_use;
    std::list<Id>::iterator place;
  };
  struct Refused {
    uint64_t last = 0, before = 0;  // uses at which it was refused, 0: never
  };
  size_t capacity_;
  Id last_id_ = 0;
  uint64_t uses_ = 0;
  std::list<Id> by_use_;  // least recently used first
  std::unordered_map<Id, Entry> entries_;
  ByName<Id> ids_;
  std::unordered_map<size_t, Refused> refused_;  // by the hash of the name
};

}  // namespace horovodish
