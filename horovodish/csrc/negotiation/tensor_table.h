// A node's knowledge of tensors (or buckets, which are negotiated as a unit): the requests in the response cache, by
// id, and the statements about undecided tensors.
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

// A request that every node's response cache knows by a number. A name has several requests if its calls differ in
// turn.
struct CachedRequest {
  TensorId id;
  std::string signature;
  Tensor* tensor;  // the tensor of the same name
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

  // Null if the name is neither cached nor pending.
  const Tensor* find(std::string_view name) const;
  Tensor* find(std::string_view name) { return const_cast<Tensor*>(std::as_const(*this).find(name)); }
  // Null unless the request is cached.
  CachedRequest* find(TensorId id);
  size_t cached() const { return by_id_.size(); }

  // Call it before a statement about a tensor, or about one of this name.
  Pending& open(Tensor& tensor);
  Tensor& open(std::string_view name);
  // The tensor is decided, or its statements no longer count. If the tensor is not cached, it is deleted.
  void close(Tensor& tensor);
  // The names of the open tensors, oldest first.
  std::vector<std::string> pending() const;
  bool any_pending() const { return pending_ > 0; }

  // Root: call it each time that a request is not cached. Returns the id that must leave the cache before the request
  // enters; kNotCached if there is room; none if the request must not enter. The leaving request was not used while the
  // new one was made three times. Every request of a training step is used once in that time, in whatever order. So a
  // working set larger than the cache keeps the entries that it has, instead of replacing all of them in each step.
  std::optional<TensorId> make_room(const Tensor& tensor, std::string_view signature);

  TensorId next_id() const { return last_id_ + 1; }
  void insert(TensorId id, std::string_view name, std::string_view signature);
  // The id becomes invalid. No pending statement may have been made by it.
  void forget(CachedRequest& request);
  void touch(CachedRequest& request);

 private:
  // Lets the table find a name without a copy of it.
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
