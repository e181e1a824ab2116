// What a rank remembers of families whose operations have failed together; see Family.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>

#include "handle.h"
#include "request.h"

namespace horovodish {

class Families {
 public:
  // Decisions that failed the family so far, of those that this rank has carried out. The negotiation, which may have heard
  // of more, has a count of its own.
  size_t failures(const std::string& family) const {
    const auto found = failures_.find(family);
    return found == failures_.end() ? 0 : found->second;
  }
  // Why an operation of this run fails that is submitted only now; null where the run goes on, or where there is none.
  const Error* failure_of(const Family& family) const {
    const auto found = std::find_if(runs_.begin(), runs_.end(), [&](const FailedRun& failed) {
      return failed.run == family.run && failed.family == family.name;
    });
    return found == runs_.end() ? nullptr : &found->error;
  }

  void count_failure(const std::string& family) { ++failures_[family]; }
  void end_run(const Family& family, const Error& error) {
    if (failure_of(family) != nullptr) return;
    runs_.push_front({family.name, family.run, error});
    if (runs_.size() > kRemembered) runs_.pop_back();
  }

 private:
  struct FailedRun {
    std::string family;
    int64_t run;
    Error error;
  };
  static constexpr size_t kRemembered = 64;  // each is needed for as long as its run goes on submitting

  std::unordered_map<std::string, size_t> failures_;
  std::deque<FailedRun> runs_;
};

}  // namespace horovodish
