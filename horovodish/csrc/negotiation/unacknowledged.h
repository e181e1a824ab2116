// Decisions that end statements which a rank may still make: the children of a node hear of them later than the node.
//
// A node keeps such a decision until every child has acknowledged it. Until then
//     fail    a child's statement about what has failed is stale: its ranks will hear that it has ended
//     forget  a child's statement by the forgotten id stands for the full request that the id stood for
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "negotiation/request.h"
#include "negotiation/tensor_table.h"

namespace horovodish {

// A cached signature that left the cache.
struct Forgotten {
  TensorId id;
  std::string name, signature;
};

class UnacknowledgedDecisions {
 public:
  explicit UnacknowledgedDecisions(size_t children) : acknowledged_(children) {}

  void add(std::variant<Fail, Forgotten> decided);
  // Notes one more acknowledgement of a child.
  void acknowledged_by(size_t child);
  void clear();

  bool has_failed(size_t child, std::string_view name, std::string_view signature) const;
  // Null if the child knows that the id was forgotten, or never knew the id.
  const Forgotten* forgotten(size_t child, TensorId id) const;
  size_t size() const { return decided_.size(); }

 private:
  size_t first_for(size_t child) const { return static_cast<size_t>(acknowledged_[child] - dropped_); }

  std::deque<std::variant<Fail, Forgotten>> decided_;  // oldest first
  uint64_t dropped_ = 0;  // number of decisions that every child has acknowledged
  std::vector<uint64_t> acknowledged_;  // by child: how many of all decisions
};

}  // namespace horovodish
