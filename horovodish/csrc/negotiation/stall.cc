#include "negotiation/stall.h"

#include <algorithm>
#include <cmath>

namespace horovodish {

namespace {
// How long an answer may take. A rank that has not answered by then is stopped or stuck. Between hosts, every idle rank
// on the way passes the question and the answer on after a nap, and a busy machine may delay it further.
constexpr StallInspector::Seconds kAnswerTime{5.0};
// How much later than the root another rank reports. The root may hear late that a rank waits.
constexpr double kPatience = 1.5;
constexpr StallInspector::Seconds kGrace{3.0};
// While something waits, the root asks this often, and at least this many times within the shutdown time. The wait of a
// rank begins anew when it hears the question, so the rank gives up before the root only if the root does not run. Two
// answers must agree that a rank submits nothing more, so a deadlock is found within 8 seconds.
constexpr StallInspector::Seconds kBetweenQuestions{2.5};
constexpr double kAsksPerShutdown = 4;
constexpr StallInspector::Seconds kLongestInterval{1.0};
}  // namespace

StallInspector::Action StallInspector::look(Clock::time_point now, std::optional<uint64_t> oldest) {
  if (oldest != oldest_) {
    oldest_ = oldest;
    since_ = now;
    asked_.reset();
    last_asked_.reset();
    reported_ = false;
    answers_.clear();
  }
  if (!oldest_) return Action::none;
  const Seconds waited = now - since_;
  if (options_.shutdown > Seconds(0) && waited > options_.shutdown) return Action::give_up;
  const Seconds warning = ranks_.empty() ? options_.warning * kPatience + kGrace : options_.warning;
  if (options_.warning > Seconds(0) && waited > warning && !asked_) {
    asked_ = last_asked_ = now;
    answers_.clear();  // answers to earlier questions are old
    return Action::ask;
  }
  const bool often = options_.shutdown > Seconds(0);
  const Seconds pause = often ? std::min(kBetweenQuestions, options_.shutdown / kAsksPerShutdown) : kBetweenQuestions;
  if (now - last_asked_.value_or(since_) > pause) {
    last_asked_ = now;
    return Action::ask;
  }
  if (asked_ && !reported_ && (answers_.size() == static_cast<size_t>(ranks_.count()) || now - *asked_ > kAnswerTime)) {
    reported_ = true;
    return Action::report;
  }
  return Action::none;
}

bool StallInspector::all_wait(uint64_t decisions) const {
  return !ranks_.empty() && answers_.size() == static_cast<size_t>(ranks_.count()) &&
         std::ranges::all_of(answers_,
                             [&](const auto& its) { return its.second.waits && its.second.decision == decisions; });
}

std::map<std::string, std::string> StallInspector::labels() const {
  std::map<std::string, std::string> all;
  for (const auto& [rank, answer] : answers_) all.insert(answer.labels.begin(), answer.labels.end());
  return all;
}

std::string StallInspector::report(Clock::time_point now, const std::string& pending) const {
  const long waited = std::lround(Seconds(now - since_).count());
  std::string text = "ranks have waited for others for " + std::to_string(waited) + " s: " + pending + ".";
  RankSet silent = ranks_;
  for (const auto& [rank, answer] : answers_) {
    text += "\n  " + text_of(rank) + " " + answer.text;
    silent.remove(RankSet(rank));
  }
  if (asked_ && !silent.empty()) {
    text += "\n  " + silent.text() + (silent.count() > 1 ? " do" : " does") +
            " not answer: stopped, or stuck where the engine cannot run";
  }
  if (options_.shutdown == Seconds(0))
    text += "\n  ranks wait without a limit: --stall-check-shutdown-time-seconds sets one";
  return text;
}

std::string StallInspector::report_silence(Clock::time_point now, WorldRank rank, const std::string& status,
                                           WorldRank parent, WorldRank root) const {
  const long waited = std::lround(Seconds(now - since_).count());
  const std::string way = parent == root ? "" : " by way of " + text_of(parent);
  return text_of(rank) + " " + status + ", for " + std::to_string(waited) + " s by now, and no answer comes from " +
         text_of(root) + way + ": stopped, or stuck where the engine cannot run";
}

StallInspector::Seconds StallInspector::interval() const {
  Seconds shortest = kLongestInterval;
  if (options_.warning > Seconds(0)) shortest = std::min(shortest, options_.warning / 4);
  if (options_.shutdown > Seconds(0)) shortest = std::min(shortest, options_.shutdown / (2 * kAsksPerShutdown));
  return shortest;
}

}  // namespace horovodish
