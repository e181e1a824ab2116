// A rank of the world. The index of a rank within a process set is a plain int, so neither can be taken for the other.
#pragma once

#include <string>

namespace horovodish {

enum class WorldRank : int {};

inline int number_of(WorldRank rank) { return static_cast<int>(rank); }
inline std::string text_of(WorldRank rank) { return "rank " + std::to_string(number_of(rank)); }

// This rank's index in a group, and the group's size.
struct RankInGroup {
  int rank = -1;  // -1: it is none of them
  int size = 0;  // 0: they are not known on this rank
  std::string ranks = {};  // of a process set: of the world, ascending, separated by commas
};

}  // namespace horovodish
