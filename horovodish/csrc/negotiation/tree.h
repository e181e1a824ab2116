// The negotiation tree of the ranks of a process set.
//
// The ranks of a host stand below its first rank, and the first ranks of the hosts stand below the first host's first
// rank. Both trees have kTreeArity children per node: no rank has more than twice as many, however many ranks there
// are.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace horovodish {

constexpr size_t kTreeArity = 8;

// A rank's neighbours in the tree.
struct TreeNode {
  std::optional<int> parent;  // none at the root, which is the first rank of the first host
  std::vector<int> children;  // those on the same host come first
};
// `hosts`: indices within a process set, by host; each list is ascending.
TreeNode tree_node(const std::vector<std::vector<int>>& hosts, int index);

// A rank and all ranks below it.
std::vector<int> subtree(const std::vector<std::vector<int>>& hosts, int index);

}  // namespace horovodish
