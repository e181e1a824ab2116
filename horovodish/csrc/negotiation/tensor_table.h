// What a node knows of tensors (or buckets, which are negotiated as a unit): the requests that the response cache holds by id,
// and what has been stated about those that are not decided yet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "negotiation/pending.h"

namespace horovodish {

using TensorId = uint32_t;
inline constexpr TensorId kNotCached = 0;

struct Tensor;

// A request that the response cache of every node knows by a number. A name has several where its calls differ in turn.
struct CachedRequest {
  TensorId id;
  std::string signature;
  Tensor* tensor;  // whose name it has
  uint64_t last_use = 0;
  std::list<CachedRequest*>::iterator place = {};  // in the order of use
};

struct Tensor {
  std::string_view name;
  std::vector<CachedRequest*> cached = {};
  Pending pending = {};

  // Null unless the request is cached.
  CachedRequest* find(std::string_view signature) const;
};

class TensorTable {
 public:
  explicit TensorTable(size_t capacity) : capacity_(capacity) {}

  // Null where it is neither cached nor pending.
  const Tensor* find(std::string_view name) const;
  Tensor* find(std::string_view name) { return const_cast<Tensor*>(std::as_const(*this).find(name)); }
  // Null unless the request is cached.
  CachedRequest* find(TensorId id);
  size_t cached() const { return by_id_.size(); }

  // A statement is about to be made about a tensor, or about one of this name.
  Pending& open(Tensor& tensor);
  Tensor& open(std::string_view name);
  // It is decided, or nothing that was stated about it counts any more. A tensor that is not cached is gone then.
  void close(Tensor& tensor);
  // The names of those that are open, oldest first.
  std::vector<std::string> pending() const;
  bool any_pending() const { return pending_ > 0; }

  // Root, each time that a request is not cached. Returns what has to leave the cache before the request enters, kNotCached
  // where there is room, and nothing where the request must not enter. What leaves was not used while this request was made
  // three times. Whatever a training step uses in whatever order is used once in between, so a working set larger than the
  // cache keeps what it has instead of replacing all of it each step.
  std::optional<TensorId> make_room(const Tensor& tensor, std::string_view signature);

  TensorId next_id() const { return last_id_ + 1; }
  void insert(TensorId id, std::string_view name, std::string_view signature);
  // Its id stands for nothing any more. Nothing that is pending may have been stated by it.
  void forget(CachedRequest& request);
  void touch(CachedRequest& request);

 private:
  // So that a table with names as keys is searched without a copy of the name.
  struct NameHash {
    using is_transparent = void;
    size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
  };
  struct Refused {
    uint64_t last = 0, before = 0;  // uses at which it was refused, 0: never
  };

  Tensor& at(std::string_view name);
  void drop_unless_needed(Tensor& tensor);

  size_t capacity_;
  TensorId last_id_ = kNotCached;
  uint64_t uses_ = 0;
  uint64_t opened_ = 0;  // so far
  size_t pending_ = 0;
  std::unordered_map<std::string, Tensor, NameHash, std::equal_to<>> by_name_;
  std::unordered_map<TensorId, CachedRequest> by_id_;
  std::list<CachedRequest*> by_use_;  // least recently used first
  std::unordered_map<size_t, Refused> refused_;  // by the hash of the signature
};

}  // namespace horovodish
