// A message of a rank besides its statements. The negotiation carries a note without reading it: from any rank to the
// root, or from the root to every rank, at the same place among the decisions.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "negotiation/wire.h"
#include "negotiation/world_rank.h"

namespace horovodish {

struct Note {
  enum class Topic : uint64_t {
    ask_status,  // the root asks what the ranks are doing
    ask_status_of_gpus,  // the root asks the same because an operation on its GPU takes long
    status,  // `rank` answers by `text`, `labels`, `decision` and `waits`
    ask_launch,  // decision `decision` of process set `process_set` needs a place in the order of launches
    launch,  // the decision has got its place
  };

  Topic topic = Topic::ask_status;
  WorldRank rank{};
  int process_set = 0;
  uint64_t decision = 0;
  bool waits = false;  // the rank has carried out `decision` decisions and submits nothing before the next one
  std::string text = {};
  std::vector<std::pair<std::string, std::string>> labels = {};  // by name: what the rank calls a waiting operation

  static auto fields(auto& its) {
    return std::tie(its.topic, its.rank, its.process_set, its.decision, its.waits, its.text, its.labels);
  }
};
template <>
inline constexpr uint64_t kEnumerators<Note::Topic> = 5;

}  // namespace horovodish
