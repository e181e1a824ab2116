// The negotiation: a state machine. With it, the ranks of a process set agree on the next collective.
//
// It has no I/O, clock or thread: statements and messages go in, messages and decisions come out.
//
// The ranks form a tree. A node is one rank, and its participants are itself and the subtrees of its children. A rank
// states about a tensor (or a bucket, which is negotiated as a unit) that it is
//     submitted   by its id when the cache knows its signature, otherwise by the full request
//     absent      submitted without a value: a mask says which members of the bucket this rank has no gradient for
// and about itself that it
//     joined      it is out of data and counts as having submitted everything
// A node passes a statement to its parent once all its participants have made it, so in the steady state every edge of
// the tree carries one small record per bucket and step. The root decides, and its decisions travel down in one order
// that is the same on every rank.
//
// If the ranks disagree about one operation of a family, every undecided operation of the family fails with that
// decision, at every node. A statement that a rank made before it heard of this is stale: a node drops it, see
// unacknowledged.h.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "negotiation/loss.h"
#include "negotiation/negotiation_messages.h"
#include "negotiation/pending.h"
#include "negotiation/statement.h"
#include "negotiation/tensor_table.h"
#include "negotiation/unacknowledged.h"

namespace horovodish {

// How much a rank made the others wait: how many collectives it submitted last, and how far behind the first rank.
struct Lateness {
  uint64_t times_last = 0;
  double total_seconds = 0, longest_seconds = 0;

  void add(double seconds);
};

// A collective that all ranks execute.
struct DecidedCollective {
  std::string name;
  std::string signature;  // empty if this rank has submitted the tensor; otherwise it has joined
  int joined_ranks = 0;  // these ranks do not contribute
  Mask absent;  // members that no rank has a value for
  std::string values;  // see Statement
  uint64_t number = 0;  // its place in the order of decisions

  bool submitted() const { return signature.empty(); }
};

// A decision that a rank carries out, in an order that is the same on every rank. Nothing is decided after a Lost. Only
// a Note to the root may be at a different place on each rank.
using Decision = std::variant<DecidedCollective, Fail, Joined, Lost, Note>;

class Negotiation {
 public:
  // `root`: this node has no parent. `participants[0]` is this rank, the others are the subtrees of its children.
  Negotiation(bool root, std::vector<RankSet> participants, size_t cache_capacity);

  // Statements of this rank. If it has joined, its submissions are stated once all ranks have joined. The decision
  // carries the values of all ranks if every rank states the tensor by its id.
  void submit(std::string_view name, std::string_view signature, const Mask& absent, std::string values = {});
  void join();

  // A rank has gone. This node heard it first, or the rank is the parent.
  void lost(const Lost& lost);
  void parent_lost(const Lost& lost) { apply(lost); }
  uint64_t decisions_seen() const { return decisions_seen_; }

  bool anything_pending() const { return tensors_.any_pending(); }
  // Returns whether ranks have joined that wait for the others.
  bool any_joined() const;
  // About undecided tensors: a number for the one that has waited longest, and a line for each of the first few.
  std::optional<uint64_t> oldest() const;
  // The same as fields. A join has an empty name and signature.
  struct Awaited {
    std::string name, signature;
    RankSet submitted, missing;
    double since_seconds;  // when the first rank submitted it, by the clock that ranks share; 0: not known
  };
  std::vector<Awaited> awaited() const;
  std::string describe_pending(const std::map<std::string, std::string>& labels = {}) const;
  void note_to_root(const Note& note);
  void note_to_all(const Note& note);  // at the root
  // Returns whether the parent should be woken for the messages of take_for_parent().
  bool take_urgent() { return std::exchange(urgent_, false); }

  // Sets the time of the following calls, on a clock that all ranks share.
  void set_now(double seconds) { now_ = seconds; }
  // At the root: by rank, for ranks that were ever last.
  const std::map<WorldRank, Lateness>& lateness() const { return lateness_; }

  void from_child(size_t child, std::string_view message);
  void from_parent(std::string_view message);

  std::string take_for_parent();
  std::string take_for_children() { return down_.take(); }
  // The oldest decision that this rank has not taken yet. Before it takes a failure, it may submit operations that the
  // failure ends.
  std::optional<Decision> take_decision();

  size_t cached() const { return tensors_.cached(); }
  // How many decisions this node keeps because a child has not acknowledged them.
  size_t unacknowledged() const { return unacknowledged_.size(); }
  // How many submissions of this rank were not made by id.
  uint64_t full_requests() const { return full_requests_; }

 private:
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
  void state_id(size_t participant, TensorId id, const Statement& statement);
  void state_id(size_t participant, const CachedRequest& request, const Statement& statement);
  void state_signature(size_t participant, std::string_view name, std::string_view signature,
                       const Statement& statement);
  void state_request(size_t participant, std::string_view name, Signatures signatures, const Statement& statement);
  void state_joined(size_t participant, WorldRank last_rank);
  // Returns whether a participant made the statement before it heard of the failure.
  bool is_stale(size_t participant, std::string_view name, std::string_view signature) const;

  // All participants have made the statements: the root decides, another node tells its parent.
  void finish(Tensor& tensor);
  template <class Record>
  void pass_up(const Record& record);
  void finish_complete();
  void finish_joined();
  void acknowledge();
  void decide(const Tensor& tensor, Statement statement);
  bool fails_because_of_joined(std::string_view name, std::string_view signature, const RankSet& joined);

  CachedRequest& known(TensorId id);
  // Apply decisions that the root made or the parent sent: pass them on, and apply them in the same order on every
  // rank.
  void apply(const Execute& decided);
  void apply(const ExecuteNew& decided);
  void apply(const Forget& decided);
  void apply(const Fail& decided);
  void apply(const Joined& joined);
  void apply(const Lost& lost);
  void apply(const Note& note) { note_to_all(note); }
  void execute(std::string_view name, std::string_view signature, bool submitted, int joined, const Mask& absent,
               std::string_view values);

  const bool root_;
  Participants participants_;
  TensorTable tensors_;
  UnacknowledgedDecisions unacknowledged_;
  std::vector<HeldBack> after_join_;  // of this rank
  WorldRank last_joined_{};
  bool joined_sent_ = false;
  bool urgent_ = false;
  uint64_t decisions_seen_ = 0;
  uint64_t full_requests_ = 0;
  double now_ = 0;
  std::map<WorldRank, Lateness> lateness_;  // by rank
  std::optional<Lost> lost_;  // the first loss, with the least `finished` of all
  UpwardRecords up_;
  std::optional<Span> span_;  // the last one in `up_`
  DownwardRecords down_;
  std::vector<Decision> decisions_;  // a queue that keeps its memory: a deque would allocate for each decision
  size_t taken_ = 0;  // how many of them this rank has taken
};

}  // namespace horovodish
