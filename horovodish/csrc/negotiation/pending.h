// An undecided tensor: the statements of a node's participants about it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "negotiation/rank_set.h"
#include "negotiation/request.h"
#include "negotiation/statement.h"

namespace horovodish {

struct CachedRequest;

// Participants of a node: one bit for each.
using ParticipantBits = uint64_t;
inline constexpr size_t kMostParticipants = 64;
inline ParticipantBits bit_of(size_t participant) { return ParticipantBits{1} << participant; }

// The sources of a node's statements: its own rank first, then the subtrees of its children.
struct Participants {
  std::vector<RankSet> ranks;
  ParticipantBits joined = 0;  // out of data: they count as having stated everything

  explicit Participants(std::vector<RankSet> subtrees);
  size_t count() const { return ranks.size(); }
  ParticipantBits all() const { return ~ParticipantBits{0} >> (kMostParticipants - count()); }
  RankSet ranks_of(ParticipantBits bits) const;
  WorldRank own_rank() const { return ranks[0].first(); }
};

class Pending {
 public:
  // `serial` shows which of two tensors is older.
  void begin(uint64_t serial) { serial_ = serial; }
  // Keeps its memory: the next small tensor would wait for an allocation.
  void end();
  bool any() const { return serial_ > 0; }
  uint64_t serial() const { return serial_; }

  void state_by_id(size_t participant, const CachedRequest& request, const Statement& statement);
  // Returns whether it was stated by the id of another request: it takes only one id, and other requests in full.
  bool has_another_id(const CachedRequest& request) const { return by_id_ != 0 && cached_ != &request; }
  // The id of this request is about to be forgotten: statements by that id now count as stated in full.
  void forget(const CachedRequest& request, const Participants& participants);
  // The requests of the participant's ranks. `whole`: every rank of the participant has stated a request, or joined.
  void state_in_full(size_t participant, const Statement& statement, const Signatures& signatures, bool whole);
  // Removes failed statements and returns whether any are left. A participant is then incomplete if its other ranks
  // have stated the tensor, too, unless they have joined.
  bool remove_failed(const std::function<bool(std::string_view)>& has_failed, const Participants& participants);

  // Returns whether every participant has stated it or joined, and the parent has not been told yet.
  bool complete(const Participants& participants) const {
    return !passed_up_ && (stated_ | participants.joined) == participants.all();
  }
  void set_passed_up() { passed_up_ = true; }
  // The cached request by whose id all statements were made; null if any statement was made in full.
  const CachedRequest* by_one_id() const { return by_id_ != 0 && in_full_.empty() ? cached_ : nullptr; }
  // All statements in one, once they are complete.
  Statement summary(const Participants& participants) const;
  // The requests, and which ranks made them.
  Signatures signatures(const Participants& participants) const;

  bool stated_here() const { return (stated_ & bit_of(0)) != 0; }  // by this rank
  RankSet submitted(const Participants& participants) const {
    return participants.ranks_of(stated_ & ~participants.joined);
  }
  RankSet missing(const Participants& participants) const {
    return participants.ranks_of(participants.all() & ~stated_ & ~participants.joined);
  }
  double since_seconds() const { return span_.first_seconds; }

 private:
  void state(size_t participant, const Statement& statement);

  uint64_t serial_ = 0;  // 0: nobody has stated it
  ParticipantBits stated_ = 0, by_id_ = 0;
  const CachedRequest* cached_ = nullptr;  // the request of the statements by id, if there are any
  bool passed_up_ = false;
  Span span_;
  RankSet joined_;  // joined ranks of the subtrees that have stated it
  Mask absent_;  // the intersection of the masks so far
  std::vector<std::string> values_;  // by participant; empty: none has any
  Signatures in_full_;
};

}  // namespace horovodish
