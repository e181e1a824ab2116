// Ranks that wait for another one: who lags, what it is doing, and when to give up. On the root of a process set.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "rank_set.h"

namespace horovodish {

class StallInspector {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  struct Options {
    Seconds warning{0};   // after which waiting is reported; 0: never
    Seconds shutdown{0};  // after which it ends in an error on every rank; 0: never
  };
  enum class Action {
    none,
    ask,      // every rank what it is doing
    report,   // report() has the message
    give_up,  // report() has the reason
  };

  StallInspector(const Options& options, RankSet ranks) : options_(options), ranks_(std::move(ranks)) {}

  // `oldest`: a number for what has waited longest, nothing when nothing waits.
  Action look(Clock::time_point now, std::optional<uint64_t> oldest);
  void told(int rank, const std::string& text) { answers_[rank] = text; }
  // `pending`: what waits, and for whom.
  std::string report(Clock::time_point now, const std::string& pending) const;
  // How often look() wants to be called while something waits.
  Seconds interval() const;
  const Options& options() const { return options_; }

 private:
  const Options options_;
  const RankSet ranks_;
  std::optional<uint64_t> oldest_;
  Clock::time_point since_{};
  std::optional<Clock::time_point> asked_;
  bool reported_ = false;
  std::map<int, std::string> answers_;  // by rank
};

}  // namespace horovodish
