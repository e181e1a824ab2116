// The families of operations (see Family) on this rank: which of their runs have failed, what is held back until the
// other ranks know of a refusal, and the names that their operations hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "handle.h"
#include "operation.h"
#include "request.h"

namespace horovodish {

class Families {
 public:
  using Operations = std::vector<std::shared_ptr<Operation>>;

  // Why an operation of this run fails that is submitted only now; null where the run goes on, or where there is none.
  const Error* failure_of(const Family& family) const;
  // Takes up an operation whose run goes on, and makes it one of the family's present attempt. False: it is held back,
  // as this rank has refused an operation of another run, and has not heard yet that all ranks know.
  bool take_up(const std::shared_ptr<Operation>& operation);

  // A decision has failed the family, as this rank learns now.
  void count_failure(const std::string& family);
  // What is submitted of the run from now on fails. Its names are free at once, also those of what is being executed.
  void end_run(const Family& family, const Error& error);
  // What was held back, to be submitted again; of all families when a rank is lost.
  Operations take_held(const std::string& family);
  Operations take_all_held();
  bool hold_any() const { return !held_.empty(); }

  // An operation of a family has its name until it ends; what belongs to no family, and a refusal, has none here.
  void claim_name(const Operation& operation);
  void release_name(const Operation& operation);
  bool has_name(const std::string& name) const { return names_.contains(name); }

 private:
  struct FailedRun {
    std::string family;
    int64_t run;
    Error error;
  };
  static constexpr size_t kRemembered = 64;  // each is needed for as long as its run goes on submitting

  // By family, decisions that failed it so far, of those that this rank has carried out. The negotiation, which may have
  // heard of more, has a count of its own.
  std::unordered_map<std::string, size_t> failures_;
  std::deque<FailedRun> failed_runs_;
  std::unordered_map<std::string, int64_t> refused_;  // by family, the run that this rank has refused
  std::unordered_map<std::string, Operations> held_;  // by family
  std::unordered_map<std::string, const Operation*> names_;
};

}  // namespace horovodish
