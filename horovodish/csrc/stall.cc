#include "stall.h"

#include <algorithm>
#include <cmath>

namespace horovodish {

namespace {
// What an answer may take; who has not answered by then is stopped or stuck. Between hosts every idle rank on the way
// may pass the question on half a second later, and then the answer, and a busy machine may be slow to let it do so.
constexpr StallInspector::Seconds kAnswerTime{5.0};
// How much later than the root another rank speaks. The root may be slow to learn that somebody waits.
constexpr double kPatience = 1.5;
constexpr StallInspector::Seconds kGrace{3.0};
constexpr StallInspector::Seconds kLongestInterval{1.0};
}  // namespace

bool StallInspector::is_over(Seconds limit, Seconds waited) const {
  if (limit <= Seconds(0)) return false;
  return waited > (ranks_.empty() ? limit * kPatience + kGrace : limit);
}

StallInspector::Action StallInspector::look(Clock::time_point now, std::optional<uint64_t> oldest) {
  if (oldest != oldest_) {
    oldest_ = oldest;
    since_ = now;
    asked_.reset();
    reported_ = false;
    answers_.clear();
  }
  if (!oldest_) return Action::none;
  if (is_over(options_.shutdown, now - since_)) return Action::give_up;
  if (is_over(options_.warning, now - since_) && !asked_) {
    asked_ = now;
    return Action::ask;
  }
  // Who waits hears again that the root is well.
  if (reported_ && options_.warning > Seconds(0) && now - *asked_ > options_.warning) {
    asked_ = now;
    return Action::ask;
  }
  if (asked_ && !reported_ && (answers_.size() == static_cast<size_t>(ranks_.count()) || now - *asked_ > kAnswerTime)) {
    reported_ = true;
    return Action::report;
  }
  return Action::none;
}

std::string StallInspector::report(Clock::time_point now, const std::string& pending) const {
  const auto waited = static_cast<long>(std::lround(Seconds(now - since_).count()));
  std::string text = "ranks have waited for others for " + std::to_string(waited) + " s: " + pending + ".";
  RankSet silent = ranks_;
  for (const auto& [rank, answer] : answers_) {
    text += "\n  rank " + std::to_string(rank) + " " + answer;
    silent.remove(rank);
  }
  if (asked_ && !silent.empty()) {
    text += "\n  " + silent.text() + (silent.count() > 1 ? " do" : " does") +
            " not answer: stopped, or stuck where the engine cannot run";
  }
  return text;
}

std::string StallInspector::report_silence(Clock::time_point now, int rank, const std::string& status, int parent,
                                           int root) const {
  const auto waited = static_cast<long>(std::lround(Seconds(now - since_).count()));
  const std::string way = parent == root ? "" : " by way of rank " + std::to_string(parent);
  return "rank " + std::to_string(rank) + " " + status + ", for " + std::to_string(waited) +
         " s by now, and no answer comes from rank " + std::to_string(root) + way +
         ": stopped, or stuck where the engine cannot run";
}

StallInspector::Seconds StallInspector::interval() const {
  Seconds shortest = kLongestInterval;
  if (options_.warning > Seconds(0)) shortest = std::min(shortest, options_.warning / 4);
  if (options_.shutdown > Seconds(0)) shortest = std::min(shortest, options_.shutdown / 4);
  return shortest;
}

}  // namespace horovodish
