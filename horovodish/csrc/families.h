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
  // Whether an operation may be submitted now. False: it is held back, because this rank has refused an operation of
  // another run of the family, and not all ranks have heard of the refusal.
  bool admit(const std::shared_ptr<Operation>& operation);

  // A decision has failed the family: all ranks know of a refusal.
  void forget_refusal(const std::string& family) { refused_.erase(family); }
  // What is submitted of the run from now on fails. Its names are free at once, also those of what is being executed.
  void end_run(const Family& family, const Error& error);
  // Takes the operations that were held back, so that they are submitted again.
  Operations take_held(const std::string& family);
  // The same of any family that has some; needs no memory.
  Operations take_any_held() { return std::move(held_.extract(held_.begin()).mapped()); }
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

  std::deque<FailedRun> failed_runs_;
  std::unordered_map<std::string, int64_t> refused_;  // by family, the run that this rank has refused
  std::unordered_map<std::string, Operations> held_;  // by family
  std::unordered_map<std::string, const Operation*> names_;
};

}  // namespace horovodish
