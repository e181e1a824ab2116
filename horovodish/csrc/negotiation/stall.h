// Ranks that wait for another one: who lags, what it is doing, and when to give up. The root of a process set inspects
// for all; every other rank inspects for itself, with more patience, in case the root is the one that does not answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "memory/clock.h"
#include "negotiation/note.h"
#include "negotiation/rank_set.h"

namespace horovodish {

class StallInspector {
 public:
  using Seconds = std::chrono::duration<double>;

  struct Options {
    Seconds warning{0};   // after which waiting is reported; 0: never
    Seconds shutdown{0};  // after which it ends in an error on every rank; 0: never
  };

  enum class Action {
    none,
    ask,      // every rank what it is doing, which also tells them that the root runs
    report,   // report() has the message
    give_up,  // report() has the reason
  };

  // `ranks`: those that the root asks; none for another rank, which leaves the root the time to speak first.
  StallInspector(const Options& options, RankSet ranks) : options_(options), ranks_(std::move(ranks)) {}

  // `oldest`: a number for what has waited longest, nothing when nothing waits.
  Action look(Clock::time_point now, std::optional<uint64_t> oldest);
  void on_status(const Note& answer) { answers_[answer.rank] = answer; }
  // At the root, which has carried out so many decisions and cannot decide what is pending: whether every rank's last
  // answer was that it submits nothing before the next decision. A rank's statements come before its answer, so nothing
  // can be decided any more.
  bool all_wait(uint64_t decisions) const;
  // By its name, what the ranks have called an operation that waits.
  std::map<std::string, std::string> labels() const;
  // The root's. `pending`: what waits, and for whom.
  std::string report(Clock::time_point now, const std::string& pending) const;
  // Another rank's. `status`: what this rank is doing.
  std::string report_silence(Clock::time_point now, WorldRank rank, const std::string& status, WorldRank parent,
                             WorldRank root) const;
  // How often look() wants to be called while something waits.
  Seconds interval() const;

 private:
  const Options options_;
  const RankSet ranks_;
  std::optional<uint64_t> oldest_;
  Clock::time_point since_{};
  std::optional<Clock::time_point> asked_;  // for the report
  std::optional<Clock::time_point> last_asked_;
  bool reported_ = false;
  std::map<WorldRank, Note> answers_;
};

}  // namespace horovodish
