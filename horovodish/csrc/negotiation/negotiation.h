// Who is ready for what: the state machine by which the ranks of a process set agree on the next collective.
//
// Without I/O, clock or thread: statements and messages go in, messages and decisions come out.
//
// The ranks form a tree. A node is one rank, and its participants are itself and the subtrees of its children. A rank
// states about a tensor (or a bucket, which is negotiated as a unit) that it is
//     submitted   by its id when the cache knows its signature, otherwise by the full request
//     absent      submitted without a value: a mask says which members of the bucket this rank has no gradient for
// and about itself that it
//     flushes     it waits for all that it has submitted
//     joined      it is out of data and counts as having submitted everything
// A node passes a statement to its parent once all its participants have made it, so in the steady state every edge of
// the tree carries one small record per bucket and step. The root decides, and its decisions travel down in one order
// that is the same on every rank.
//
// Where the ranks disagree about one operation of a family, whatever is undecided of it fails with that decision, at every
// node. A statement that was made before its rank had heard of this is stale: a node drops it, see unheard.h.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "negotiation/loss.h"
#include "negotiation/negotiation_messages.h"
#include "negotiation/pending.h"
#include "negotiation/response_cache.h"
#include "negotiation/statement.h"
#include "negotiation/unheard.h"

namespace horovodish {

// What a rank made the others wait: the collectives that it was the last to submit, and how far behind the first.
struct Lateness {
  uint64_t times_last = 0;
  double total_seconds = 0, longest_seconds = 0;

  void add(double seconds);
};

struct Decision {
  enum class Type {
    execute,  // `name`, contributed to by all but `joined_ranks`; `absent` members have no gradient on any rank
    fail,  // `name` ends on every rank: they disagree as `text` says; `families` end with it
    join_done,  // every rank has joined, `rank` last
    lost,  // a rank has gone, as `text`, `loss` and `number` say: nothing is decided any more
    stuck,  // root only: every rank waits, but for different tensors, as long as all_wait(); `text` says who waits for what
    announced,  // the root has announced `note` to every rank
    said,  // root only: a rank has said `note`
  };
  Type type;
  std::string name = {};
  std::string text = {};
  bool submitted = false;  // execute only: true if this rank submitted the tensor, false if it has joined
  std::string signature = {};  // of an execute that this rank has not submitted
  int joined_ranks = 0;
  WorldRank rank{};
  Loss loss = Loss::left;
  Mask absent = {};
  uint64_t number = 0;  // of an execute: its place in the order of decisions; of a loss: see Lost::finished
  std::vector<std::string> families = {};
  std::string values = {};  // of an execute: see Statement
  Note note = {};
};

class Negotiation {
 public:
  // `root`: this node has no parent. `participants[0]` is this rank, the others are the subtrees of its children.
  Negotiation(bool root, std::vector<RankSet> participants, size_t cache_capacity);

  // Statements of this rank. What it submits after it has joined is stated once all ranks have joined. The values of all
  // ranks ride with the decision if every rank states the tensor by its id.
  void submit(std::string_view name, std::string_view signature, const Mask& absent, std::string values = {});
  void flush();  // says nothing when nothing of this rank is undecided
  void take_back_flush();  // this rank may submit more before the next decision
  void join();

  // A rank has gone. Known first to this node, or the parent itself is the one that has gone.
  void lost(const Lost& lost);
  void parent_lost(const Lost& lost) { apply(lost); }
  uint64_t decisions_seen() const { return decisions_seen_; }

  bool anything_pending() const { return !by_id_.empty() || !by_name_.empty(); }
  // Whether some have joined that wait for the others.
  bool any_joined() const;
  // Whether every rank of this node's subtree waits and will submit nothing more before the next decision.
  bool all_wait() const;
  // Of what is not decided yet, a number for what has waited longest, and a line for each of the first few.
  std::optional<uint64_t> oldest() const;
  std::string describe_pending() const;
  // To the root, or from the root to every rank.
  void say(const Note& note);
  void announce(const Note& note);
  // Whether the parent should be woken for what take_for_parent() gave.
  bool take_urgent() { return std::exchange(urgent_, false); }

  // The time of what comes next, on a clock that all ranks share.
  void set_now(double seconds) { now_ = seconds; }
  // At the root: by rank, of those that were ever last.
  const std::map<WorldRank, Lateness>& lateness() const { return lateness_; }

  void from_child(size_t child, std::string_view message);
  void from_parent(std::string_view message);

  std::string take_for_parent();
  std::string take_for_children() { return down_.take(); }
  // The oldest decision that this rank has not taken yet. Until it takes a failure, it may submit what that ends.
  std::optional<Decision> take_decision();

  size_t cached() const { return cache_.size(); }
  // How many decisions this node remembers because a child has not heard of them.
  size_t unheard() const { return unheard_.size(); }
  // How many submissions of this rank were not by id.
  uint64_t full_requests() const { return full_requests_; }

 private:
  using Id = ResponseCache::Id;
  class Child;
  struct HeldBack {
    std::string name, signature;
    Mask absent;
  };

  WorldRank own_rank() const { return participants_.own_rank(); }
  Statement own_statement(const Mask& absent, std::string values = {}) const {
    return {{own_rank(), now_, now_}, {}, absent, std::move(values)};
  }

  // Statements of a participant.
  void state_id(size_t participant, Id id, const Statement& statement);
  void state_signature(size_t participant, const std::string& name, std::string_view signature,
                       const Statement& statement);
  void state_request(size_t participant, const std::string& name, Signatures signatures, const Statement& statement);
  void state_joined(size_t participant, WorldRank last_rank);
  void state_waiting(size_t participant, uint64_t decisions_seen);
  void hear(size_t participant);
  void acknowledge();
  void take_back_waiting(size_t participant);
  Pending& stated_in_full(const std::string& name);
  Pending& to_full_request(Id id);
  // Made by a participant that had not heard that it has failed.
  bool is_stale(size_t participant, std::string_view name, std::string_view signature) const;

  // All participants have made them: the root decides, another node tells its parent.
  void finish_id(Id id);
  void finish_request(const std::string& name);
  template <class Record>
  void pass_up(const Record& record);
  void finish_complete();
  void finish_joined();
  void finish_waiting();
  void decide(const std::string& name, const std::string& signature, const Statement& statement, std::optional<Id> id);
  void decide_new(const std::string& name, const std::string& signature, int joined, const Mask& absent);

  const ResponseCache::Tensor& known(Id id) const;
  // Decisions, made by the root or received from the parent: passed on, and applied in the same order on every rank.
  void apply(const Execute& decided);
  void apply(const ExecuteNew& decided);
  void apply(const Forget& decided);
  void apply(const Fail& decided);
  void apply(const JoinDone& decided);
  void apply(const Lost& lost);
  void apply(const Note& note) { announce(note); }
  void execute(std::string_view name, std::string_view signature, bool submitted, int joined, const Mask& absent,
               std::string_view values);

  const bool root_;
  Participants participants_;
  ResponseCache cache_;
  // What is undecided: a tensor is in one of the two.
  std::unordered_map<Id, Pending> by_id_;
  ByName<Pending> by_name_;
  Unheard unheard_;
  std::vector<HeldBack> after_join_;  // of this rank
  WorldRank last_joined_{};
  bool joined_sent_ = false;
  bool urgent_ = false;
  std::vector<std::optional<uint64_t>> waiting_;  // by participant: decisions it had seen when it began to wait
  uint64_t decisions_seen_ = 0;
  uint64_t statements_ = 0;  // so far; the serial of a tensor is the number of the first about it
  uint64_t full_requests_ = 0;
  double now_ = 0;
  std::map<WorldRank, Lateness> lateness_;  // by rank
  std::optional<Lost> lost_;  // the first one
  uint64_t finished_ = 0;  // the least of all that were lost
  UpwardRecords up_;
  std::optional<Span> span_;  // that is in `up_` last
  DownwardRecords down_;
  std::deque<Decision> decisions_;
};

}  // namespace horovodish
