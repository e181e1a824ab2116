// What the neighbours in the negotiation's tree say to each other: statements upwards, decisions downwards.
//
// A message is a sequence of records. Each is a call of Upward or Downward: a writer writes it down, and reading the
// message makes the same call again at the other end of the edge.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "negotiation/loss.h"
#include "negotiation/note.h"
#include "negotiation/rank_set.h"
#include "negotiation/records.h"
#include "negotiation/response_cache.h"
#include "negotiation/statement.h"

namespace horovodish {

class Upward {
 public:
  using Id = ResponseCache::Id;
  virtual ~Upward() = default;

  // Of the sender's whole subtree:
  virtual void ready(Id id, const Statement& statement) = 0;  // for a tensor that the cache knows
  virtual void request(std::string_view name, const Signatures& signatures, const Statement& statement) = 0;  // in full
  virtual void joined(WorldRank last_rank) = 0;
  virtual void waiting(uint64_t decisions_seen) = 0;
  // Of the sender: it has applied one more of the decisions that its parent remembers for it, see unheard.h.
  virtual void heard() = 0;
  // Of single ranks, for the root:
  virtual void lost(const Lost& lost) = 0;
  virtual void say(const Note& note) = 0;
};

class Downward {
 public:
  using Id = ResponseCache::Id;
  static constexpr Id kNotCached = 0;
  virtual ~Downward() = default;

  // `joined`: how many ranks do not contribute. `absent`: members that no rank has a value for.
  virtual void execute(Id id, int joined, const Mask& absent) = 0;
  // What was stated in full. It enters the cache, unless `id` is kNotCached.
  virtual void execute_new(Id id, std::string_view name, std::string_view signature, int joined,
                           const Mask& absent) = 0;
  virtual void forget(Id id) = 0;  // it leaves the cache
  virtual void fail(std::string_view name, std::string_view text, const std::vector<std::string>& families) = 0;
  virtual void join_done(WorldRank last_rank) = 0;
  virtual void give_up(const Lost& lost) = 0;  // whatever is undecided
  virtual void announce(const Note& note) = 0;
};

class UpwardWriter final : public Upward {
 public:
  // `leaf`: the subtree is one rank. That it was the first and the last to state something need not be said.
  explicit UpwardWriter(bool leaf) : leaf_(leaf) {}

  void ready(Id id, const Statement& statement) override;
  void request(std::string_view name, const Signatures& signatures, const Statement& statement) override;
  void joined(WorldRank last_rank) override;
  void waiting(uint64_t decisions_seen) override;
  void heard() override;
  void lost(const Lost& lost) override;
  void say(const Note& note) override;

  std::string take();

 private:
  void write(const Span& span);

  const bool leaf_;
  Records records_;
  std::optional<Span> span_;  // that the message has said last
};

class DownwardWriter final : public Downward {
 public:
  void execute(Id id, int joined, const Mask& absent) override;
  void execute_new(Id id, std::string_view name, std::string_view signature, int joined, const Mask& absent) override;
  void forget(Id id) override;
  void fail(std::string_view name, std::string_view text, const std::vector<std::string>& families) override;
  void join_done(WorldRank last_rank) override;
  void give_up(const Lost& lost) override;
  void announce(const Note& note) override;

  std::string take() { return records_.take(); }

 private:
  Records records_;
};

// `sender`: the ranks of its subtree. Where another host's clock is ahead of ours, a statement counts as made `now`.
void read_upward(std::string_view message, const RankSet& sender, double now, Upward& receiver);
void read_downward(std::string_view message, Downward& receiver);

}  // namespace horovodish
