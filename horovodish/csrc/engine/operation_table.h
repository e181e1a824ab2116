// The operations of this rank in a process set, from their submission to their end. The one place that knows their names and
// their families (see Family). Without I/O, clock or thread.
//
// A name is in use until its operation ends. Of a family, what the same run submits after a failure fails at once. A refusal
// takes time to reach the other ranks, so what this rank submits of a later run is held until it has:
//
//     rank 0 submits tree.a, tree.b of its first run     rank 1 submits tree.a, refuses tree.b
//     both hear: tree.b has failed, and the family tree  rank 1 has submitted tree.a of its second run meanwhile
//
// Had rank 1 stated that tree.a at once, rank 0 could have taken it for a part of its own first run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "negotiation/request.h"
#include "operation/handle.h"
#include "operation/operation.h"

namespace horovodish {

class OperationTable {
 public:
  using Pointer = std::shared_ptr<Operation>;
  using Executing = std::map<uint64_t, Pointer>;

  class Owner {
   public:
    virtual ~Owner() = default;
    // It is to be stated to the other ranks.
    virtual void state(const Pointer& operation) = 0;
    // It has ended, with an error or none.
    virtual void settle(const Pointer& operation, const Error* error) noexcept = 0;
    // The table could not take it before: calls submit(). If that throws, the operation must be settled nevertheless.
    virtual void submit_again(const Pointer& operation) noexcept = 0;
  };

  // `rank`: for messages.
  OperationTable(int process_set, WorldRank rank, Owner& owner)
      : process_set_(process_set), rank_(rank), owner_(owner) {}

  void submit(const Pointer& operation);
  static std::logic_error unexpected(const std::string& name);
  // The end of a join, which every rank has called, rank `last` last.
  void end_join(WorldRank last) noexcept;
  // Decided, with this number: it is executed from now on. Throws unexpected() if this rank has not submitted it.
  Pointer begin(const std::string& name, uint64_t decision);
  // The same for the part of a rank that has joined, which nobody has submitted.
  void begin_for_joined(const Pointer& operation) { executing_.emplace(operation->decision, operation); }
  // Once one of that name has begun or ended: the next one that was submitted under it.
  void submit_next(const std::string& name);
  // Decided: the operation and all of these families fail.
  void fail(const std::string& name, const std::string& text, const std::vector<std::string>& families);
  // It has been executed, or could not be.
  void end(const Pointer& operation, const Error* error) noexcept;

  // Why what this run has yet to submit fails; null if it does not.
  const Error* failure_of(const Family& family) const;

  // Everything that is not decided, or all that is executed, ends with an error. These need no memory.
  void abandon_undecided(const Error& error) noexcept;
  void abandon_executing(const Error& error) noexcept;

  bool busy() const { return !undecided_.empty() || !waiting_for_family_.empty() || !executing_.empty() || join_; }
  size_t undecided() const { return undecided_.size(); }
  // The oldest ones first, so many at most.
  std::vector<const Operation*> oldest_undecided(size_t most) const;
  const Request& some_undecided() const { return *undecided_.begin()->second->request; }
  // By its name, what this rank calls an operation that is not decided, where the other ranks may call it otherwise.
  std::vector<std::pair<std::string, std::string>> labels() const;
  // By the number of its decision.
  const Executing& executing() const { return executing_; }
  // Null when this rank has not joined.
  const Pointer& join() const { return join_; }

 private:
  struct FailedRun {
    std::string family;
    int64_t run;
    Error error;
  };
  static constexpr size_t kRemembered = 64;  // each is needed for as long as its run goes on submitting

  bool wait_for_family(const Pointer& operation);
  void fail_one(const std::string& name, const Error& error);
  void fail_family(const std::string& family, const std::string& name, const Error& error);
  void end_run(const Family& family, const Error& error);

  const int process_set_;
  const WorldRank rank_;
  Owner& owner_;
  std::unordered_map<std::string, Pointer> undecided_;
  Executing executing_;
  Pointer join_;
  // Whose name it is. A refusal has none, and neither has what is executed of a run that has failed.
  std::unordered_map<std::string, const Operation*> names_in_use_;
  // By name, what waits for an undecided operation of that name: after a refusal the caller may use the name again before
  // all ranks know of it, and a rank may refuse a second operation while the first one is under way.
  std::unordered_map<std::string, std::deque<Pointer>> queued_by_name_;
  std::deque<FailedRun> failed_runs_;
  std::unordered_map<std::string, int64_t>
      refused_runs_;  // by family, the run that this rank has refused, until all know it
  std::unordered_map<std::string, std::vector<Pointer>>
      waiting_for_family_;  // by family, what later runs have submitted since
};

}  // namespace horovodish
