// The operations of this rank in a process set, from their submission to their end. The one place that knows their names and
// their families (see Family). Without I/O, clock or thread.
//
// A name is in use until its operation ends. After a failure in a family, later submissions of the same run fail at
// once. A refusal takes time to reach the other ranks. Until all of them know it, this rank holds its submissions of
// later runs:
//
//     rank 0 submits tree.a, tree.b of its first run     rank 1 submits tree.a, refuses tree.b
//     both hear: tree.b has failed, and the family tree  rank 1 has submitted tree.a of its second run meanwhile
//
// Without the wait, rank 0 could take rank 1's second tree.a for a part of its own first run.
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
    // The owner must state the operation to the other ranks.
    virtual void state(const Pointer& operation) = 0;
    // The operation has ended, with an error or none.
    virtual void settle(const Pointer& operation, const Error* error) noexcept = 0;
    // The table held the operation and can now take it: the owner calls submit(). If that throws, the owner must still
    // settle it.
    virtual void submit_again(const Pointer& operation) noexcept = 0;
  };

  // `rank`: for messages.
  OperationTable(int process_set, WorldRank rank, Owner& owner)
      : process_set_(process_set), rank_(rank), owner_(owner) {}

  void submit(const Pointer& operation);
  static std::logic_error unexpected(const std::string& name);
  // Ends a join that every rank has called. Rank `last` called it last.
  void end_join(WorldRank last) noexcept;
  // The operation is decided, with this number, and is executed from now on. Throws unexpected() if this rank has not
  // submitted it.
  Pointer begin(const std::string& name, uint64_t decision);
  // The same for a rank that has joined: nobody has submitted its part.
  void begin_for_joined(const Pointer& operation) { executing_.emplace(operation->decision, operation); }
  // Call it after an operation of this name has begun or ended. Submits the next operation of the name.
  void submit_next(const std::string& name);
  // The operation and all of these families are decided to fail.
  void fail(const std::string& name, const std::string& text, const std::vector<std::string>& families);
  // The operation has been executed, or could not be.
  void end(const Pointer& operation, const Error* error) noexcept;

  // Why later submissions of this run fail; null if they do not.
  const Error* failure_of(const Family& family) const;

  // End all undecided operations, or all executing ones, with an error. They need no memory.
  void abandon_undecided(const Error& error) noexcept;
  void abandon_executing(const Error& error) noexcept;

  bool busy() const { return !undecided_.empty() || !waiting_for_family_.empty() || !executing_.empty() || join_; }
  size_t undecided() const { return undecided_.size(); }
  // The oldest undecided operations, at most `most`, the oldest one first.
  std::vector<const Operation*> oldest_undecided(size_t most) const;
  const Request& some_undecided() const { return *undecided_.begin()->second->request; }
  // By name: what this rank calls an undecided operation, if the other ranks may call it otherwise.
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
  // The operation that holds the name. A refusal holds no name, and neither does an executing operation of a failed
  // run.
  std::unordered_map<std::string, const Operation*> names_in_use_;
  // By name: operations that wait for an undecided operation of the name. After a refusal, the caller may use the name
  // again before all ranks know of the refusal. A rank may also refuse a second operation while the first one is under
  // way.
  std::unordered_map<std::string, std::deque<Pointer>> queued_by_name_;
  std::deque<FailedRun> failed_runs_;
  std::unordered_map<std::string, int64_t>
      refused_runs_;  // by family: the run that this rank has refused, until all ranks know of it
  std::unordered_map<std::string, std::vector<Pointer>>
      waiting_for_family_;  // by family: submissions of later runs since then
};

}  // namespace horovodish
