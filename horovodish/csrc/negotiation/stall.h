// Ranks that wait for another one: which rank lags, what it is doing, and when to give up. The root of a process set
// inspects for all. Every other rank inspects for itself, with more patience, in case the root does not answer.
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
    Seconds warning{0};   // wait after which to report; 0: never
    Seconds shutdown{0};  // wait after which every rank raises an error; 0: never
  };

  enum class Action {
    none,
    ask,      // ask every rank what it is doing, which also shows that the root runs
    report,   // print the message of report()
    give_up,  // give up for the reason of report()
  };

  // `ranks`: the ranks that the root asks; none for another rank, which lets the root speak first.
  StallInspector(const Options& options, RankSet ranks) : options_(options), ranks_(std::move(ranks)) {}

  // `oldest`: a number for what has waited longest; none if nothing waits.
  Action look(Clock::time_point now, std::optional<uint64_t> oldest);
  void on_status(const Note& answer) { answers_[answer.rank] = answer; }
  // At the root, which has carried out this number of decisions and cannot decide what is pending. Returns whether
  // every rank's last answer was that it submits nothing before the next decision. A rank's statements come before its
  // answer, so nothing more can be decided.
  bool all_wait(uint64_t decisions) const;
  // By name: what the ranks call a waiting operation.
  std::map<std::string, std::string> labels() const;
  // The root's report. `pending`: what waits, and for which ranks.
  std::string report(Clock::time_point now, const std::string& pending) const;
  // Another rank's report. `status`: what this rank is doing.
  std::string report_silence(Clock::time_point now, WorldRank rank, const std::string& status, WorldRank parent,
                             WorldRank root) const;
  // How often to call look() while something waits.
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
