// What a rank says beside its statements. The negotiation carries a note without looking into it: from any rank to the root,
// or from the root to every rank, where it has the same place among the decisions.
#pragma once

#include <cstdint>
#include <string>

#include "negotiation/wire.h"
#include "negotiation/world_rank.h"

namespace horovodish {

struct Note {
  enum class Topic : uint64_t {
    status,  // the root asks what the ranks are doing; `rank` does what `text` says
    launch,  // decision `decision` of process set `process_set` needs its place in the order of launches; it has it now
  };
  static constexpr uint64_t kTopics = 2;

  Topic topic = Topic::status;
  WorldRank rank{};
  int process_set = 0;
  uint64_t decision = 0;
  std::string text = {};

  void encode(Writer& writer) const {
    writer.number(static_cast<uint64_t>(topic));
    writer.number(static_cast<uint64_t>(rank));
    writer.number(static_cast<uint64_t>(process_set));
    writer.number(decision);
    writer.text(text);
  }
  static Note decode(Reader& reader) {
    const auto topic = static_cast<Topic>(reader.number_below(kTopics));
    const WorldRank rank = reader.rank();
    const int process_set = reader.positive_int();
    const uint64_t decision = reader.number();
    return {topic, rank, process_set, decision, std::string(reader.text())};
  }
};

}  // namespace horovodish
