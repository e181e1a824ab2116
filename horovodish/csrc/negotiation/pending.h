// A tensor that is not decided yet: what the participants of a node have stated about it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "negotiation/rank_set.h"
#include "negotiation/statement.h"

namespace horovodish {

// Whom a node hears statements from: its own rank first, then the subtrees of its children.
struct Participants {
  std::vector<RankSet> ranks;
  std::vector<bool> joined;  // which of them are out of data, and count as having stated everything

  explicit Participants(std::vector<RankSet> subtrees) : ranks(std::move(subtrees)), joined(ranks.size()) {}
  size_t count() const { return ranks.size(); }
  WorldRank own_rank() const { return ranks[0].first(); }
};

class Pending {
 public:
  // `participants` outlive it. `serial` tells which of two is older.
  Pending(const Participants& participants, uint64_t serial)
      : participants_(participants), serial_(serial), stated_(participants.count()) {}

  // `whole`: every rank of the participant has stated it or joined.
  void state(size_t participant, const Statement& statement, bool whole = true);
  // In full: the signatures of the participant's ranks. Those that are known already change nothing.
  void add(const Signatures& signatures);
  // What was stated by an id so far was stated with this signature.
  void to_full_request(const std::string& signature);
  // Takes out the statements with such signatures. False when nothing is left. Participants whose other ranks have
  // stated it, too, are incomplete then, unless they have joined.
  bool take_out(const std::function<bool(const std::string&)>& is_stale);

  // Every participant has stated it or joined, and the parent has not been told yet.
  bool complete() const;
  void set_passed_up() { passed_up_ = true; }
  // All of it in one, once it is complete.
  Statement summary() const;
  // By signature, the ranks that have stated it; empty unless it was stated in full.
  const Signatures& signatures() const { return signatures_; }

  bool stated_here() const { return stated_[0]; }  // by this rank
  uint64_t serial() const { return serial_; }
  // Who has submitted it and who has not.
  std::string describe(const std::string& name) const;

 private:
  const Participants& participants_;
  const uint64_t serial_;
  std::vector<bool> stated_;  // by participant
  Span span_;
  RankSet joined_;  // of the ranks whose subtree has stated it
  std::optional<Mask> absent_;  // the intersection so far
  std::vector<std::string> values_;  // by participant; empty: none has any
  Signatures signatures_;
  bool passed_up_ = false;
};

}  // namespace horovodish
