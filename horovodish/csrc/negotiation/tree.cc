#include "negotiation/tree.h"

#include <algorithm>

namespace horovodish {

namespace {

// The children of place `place` in a tree of `size` places whose levels are filled in order.
std::vector<size_t> places_below(size_t place, size_t size) {
  std::vector<size_t> places;
  for (size_t child = place * kTreeArity + 1; child <= (place + 1) * kTreeArity && child < size; ++child) {
    places.push_back(child);
  }
  return places;
}

size_t place_above(size_t place) { return (place - 1) / kTreeArity; }

}  // namespace

TreeNode tree_node(const std::vector<std::vector<int>>& hosts, int index) {
  const auto has_it = [index](const auto& ranks) { return std::binary_search(ranks.begin(), ranks.end(), index); };
  const auto found = std::ranges::find_if(hosts, has_it);
  const std::vector<int>& local = *found;
  const auto host = static_cast<size_t>(found - hosts.begin());
  const auto place = static_cast<size_t>(std::lower_bound(local.begin(), local.end(), index) - local.begin());
  TreeNode node;
  for (const size_t child : places_below(place, local.size())) node.children.push_back(local[child]);
  if (place > 0) {
    node.parent = local[place_above(place)];
    return node;
  }
  for (const size_t child : places_below(host, hosts.size())) node.children.push_back(hosts[child].front());
  if (host > 0) node.parent = hosts[place_above(host)].front();
  return node;
}

std::vector<int> subtree(const std::vector<std::vector<int>>& hosts, int index) {
  std::vector<int> ranks{index};
  for (const int child : tree_node(hosts, index).children) {
    const std::vector<int> below = subtree(hosts, child);
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  return ranks;
}

}  // namespace horovodish
