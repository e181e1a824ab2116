// Decisions that end what a rank may still state: the children of a node hear of them later than the node.
//
// A node keeps such a decision until every child has said that it has heard of it. Until then
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

#include "negotiation/response_cache.h"

namespace horovodish {

// A name, and all operations of some families, end with an error.
struct Failed {
  std::string name;
  std::vector<std::string> families;

  // Whether it ends a statement with this signature.
  bool ends(std::string_view its_name, std::string_view signature) const;
};

// A cached signature that left the cache.
struct Forgotten {
  ResponseCache::Id id;
  std::string name, signature;
};

class Unheard {
 public:
  using Decided = std::variant<Failed, Forgotten>;

  explicit Unheard(size_t children) : heard_(children) {}

  void add(Decided decided);
  // A child has heard of one decision more.
  void heard(size_t child);
  void clear();

  bool has_failed(size_t child, std::string_view name, std::string_view signature) const;
  // Null where the child knows that the id was forgotten, or never knew it.
  const Forgotten* forgotten(size_t child, ResponseCache::Id id) const;
  size_t size() const { return decided_.size(); }

 private:
  size_t first_for(size_t child) const { return static_cast<size_t>(heard_[child] - dropped_); }

  std::deque<Decided> decided_;  // oldest first
  uint64_t dropped_ = 0;  // how many every child has heard of
  std::vector<uint64_t> heard_;  // by child, how many of all
};

}  // namespace horovodish
