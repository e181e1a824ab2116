// What a rank says beside its statements. The negotiation carries a note without looking into it: from any rank to the root,
// or from the root to every rank, where it has the same place among the decisions.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "negotiation/wire.h"
#include "negotiation/world_rank.h"

namespace horovodish {

struct Note {
  enum class Topic : uint64_t {
    status,  // the root asks what the ranks are doing; `rank` does what `text` says
    status_of_gpus,  // the root asks the same because an operation on its GPU takes long
    launch,  // decision `decision` of process set `process_set` needs its place in the order of launches; it has it now
  };

  Topic topic = Topic::status;
  WorldRank rank{};
  int process_set = 0;
  uint64_t decision = 0;
  std::string text = {};

  static auto fields(auto& its) { return std::tie(its.topic, its.rank, its.process_set, its.decision, its.text); }
};
template <>
inline constexpr uint64_t kEnumerators<Note::Topic> = 3;

}  // namespace horovodish
