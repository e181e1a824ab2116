#include "engine/watch.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "engine/warning.h"

namespace horovodish {

namespace {

// Every rank waits and nothing can be decided. A thread that has never waited, such as one of a framework, may still submit
// something, so the ranks fail only when nothing was submitted for this time.
constexpr std::chrono::seconds kStuckAfter{5};

// What a GPU has been given is worth a word in a rank's status when it has taken this long.
constexpr std::chrono::seconds kLongOnGpu{1};

Watch::Inspection stall(std::string text) { return {.lost = Lost{.loss = Loss::stall, .text = std::move(text)}}; }

}  // namespace

Watch::Watch(const ProcessSetConfig& config, const EngineOptions& options, Negotiation& negotiation,
             Neighbours& neighbours, const OperationTable& operations, const std::unique_ptr<Plane>& plane,
             std::function<uint64_t()> steps)
    : config_(config),
      options_(options),
      negotiation_(negotiation),
      neighbours_(neighbours),
      operations_(operations),
      plane_(plane),
      steps_(std::move(steps)) {
  if (!StallInspector::wanted(options_.stall)) return;
  RankSet all;
  for (const WorldRank rank : config_.ranks) all.add(RankSet(rank));
  stall_.emplace(options_.stall, neighbours_.at_root() ? all : RankSet());
  launched_stall_.emplace(options_.stall, neighbours_.at_root() ? all : RankSet());
}

void Watch::submitted(const Operation& operation, Clock::time_point now) {
  last_news_ = now;
  if (operation.request->kind == Kind::join) return;
  ++news_;
  last_submitted_ = operation.request;
}

void Watch::decided(Clock::time_point now) {
  last_news_ = now;
  ++news_;
  stuck_text_.clear();
}

bool Watch::is_quiet() const {
  const auto& [warning, shutdown] = options_.stall;
  const auto limit = warning.count() > 0 ? warning : shutdown;
  return limit.count() > 0 && quiet_for() > limit;
}

void Watch::stuck(const std::string& text) {
  stuck_text_ = text;
  stuck_since_ = Clock::now();
}

void Watch::asked(bool about_gpus, Clock::time_point now) {
  if (!neighbours_.at_root()) ++(about_gpus ? questions_about_gpus_ : news_);
  const auto warning = options_.stall.warning;
  const bool lags = warning.count() > 0 && now - last_news_ > warning && operations_.undecided() == 0 &&
                    operations_.executing().empty() && !oldest_launched();
  if (options_.stack_signal != 0 && lags && std::exchange(stacks_shown_, last_news_) != last_news_) {
    kill(getpid(), options_.stack_signal);
  }
  negotiation_.say({.topic = Note::Topic::status, .rank = config_.world_rank(config_.own), .text = status(now)});
}

void Watch::told(WorldRank rank, const std::string& text) {
  if (!stall_) return;
  stall_->told(rank, text);
  launched_stall_->told(rank, text);
}

Watch::Inspection Watch::inspect() {
  const Clock::time_point now = Clock::now();
  if (stall_ && now >= next_inspection_) {
    next_inspection_ = now + std::chrono::duration_cast<Clock::duration>(stall_->interval() / 2);
    Inspection found = inspect_waiting(now);
    if (!found.asks && !found.lost) found = inspect_launched(now);
    if (found.asks || found.lost) return found;
  }
  return inspect_stuck();
}

Watch::Inspection Watch::inspect_waiting(Clock::time_point now) {
  const StallInspector::Action action = stall_->look(now, waiting());
  const bool at_root = neighbours_.at_root();
  // The root may be idle and asleep, and then does not know that it is waited for.
  if (!at_root && waiting() && now - last_news_ > stall_->interval()) neighbours_.nudge_parent();
  if (action == StallInspector::Action::none || (!at_root && action == StallInspector::Action::ask)) return {};
  if (action == StallInspector::Action::ask) {
    negotiation_.announce({.topic = Note::Topic::status});
    return {.asks = true};
  }
  const std::string text = at_root ? stall_->report(now, describe_waiting())
                                   : stall_->report_silence(now, config_.world_rank(config_.own), status(now),
                                                            neighbours_.parent_rank(), config_.ranks[0]);
  if (action == StallInspector::Action::give_up) return stall(text);
  warn(text);
  return {};
}

// An operation ends on one rank's GPU and not on another's, such as a broadcast at its root. So every rank looks after its own
// GPU. The root asks all ranks. Another rank speaks for itself where the root does not ask.
Watch::Inspection Watch::inspect_launched(Clock::time_point now) {
  const auto launched = oldest_launched();
  const auto number = launched ? std::optional(launched->number + questions_about_gpus_) : std::nullopt;
  const StallInspector::Action action = launched_stall_->look(now, number);
  const bool at_root = neighbours_.at_root();
  if (action == StallInspector::Action::none || (!at_root && action == StallInspector::Action::ask)) return {};
  if (action == StallInspector::Action::ask) {
    negotiation_.announce({.topic = Note::Topic::status_of_gpus});
    return {.asks = true};
  }
  const std::string text =
      at_root
          ? launched_stall_->report(now, label_of(*launched->request) + " was launched on the GPUs and has not ended")
          : describe_launched(*launched, now);
  if (action == StallInspector::Action::give_up) return stall(text);
  warn(text);
  return {};
}

// At the root: ends what nobody can go on with. Where the user wants no check for stalls, that remains a warning.
Watch::Inspection Watch::inspect_stuck() {
  if (stuck_text_.empty()) return {};
  if (!negotiation_.all_wait()) stuck_text_.clear();
  if (stuck_text_.empty() || Clock::now() - stuck_since_ < kStuckAfter) return {};
  const std::string text = std::exchange(stuck_text_, {});
  if (stall_) return stall(text);
  warn(text);
  return {};
}

std::optional<std::chrono::nanoseconds> Watch::nap() const {
  using Nanoseconds = std::chrono::nanoseconds;
  std::optional<Nanoseconds> nap;
  if (!stuck_text_.empty()) nap = kStuckAfter;
  if (stall_ && (negotiation_.anything_pending() || negotiation_.any_joined() || !operations_.executing().empty() ||
                 (plane_ && plane_->needs_watching()))) {
    const auto interval = std::chrono::duration_cast<Nanoseconds>(stall_->interval());
    nap = std::min(nap.value_or(interval), interval);
  }
  return nap;
}

// What has waited longest, as a number that stays the same as long as nothing moves.
std::optional<uint64_t> Watch::waiting() const {
  const bool executes = !operations_.executing().empty();
  if (!neighbours_.at_root()) return operations_.busy() ? std::optional(news_) : std::nullopt;
  if (const auto oldest = negotiation_.oldest()) return oldest;
  if (!executes && !negotiation_.any_joined()) return std::nullopt;
  return std::numeric_limits<uint64_t>::max() - news_;
}

// At the root.
std::string Watch::describe_waiting() const {
  std::string text = negotiation_.describe_pending();
  if (operations_.executing().empty()) return text;
  if (!text.empty()) text += "; ";
  return text + label_of(*operations_.executing().begin()->second->request) + " has been begun but not finished";
}

std::optional<Plane::Launched> Watch::oldest_launched() const {
  return plane_ ? plane_->oldest_launched() : std::nullopt;
}

std::string Watch::describe_launched(const Plane::Launched& launched, Clock::time_point now) const {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - launched.since).count();
  return label_of(*launched.request) + " was launched on the GPU of " + text_of(config_.world_rank(config_.own)) + " " +
         std::to_string(seconds) + " s ago and has not ended: " +
         (launched.has_inputs ? "this GPU waits in it for another rank's, or it hangs"
                              : "this GPU has not yet come to it, since it still computes what comes before");
}

// What this rank is doing, for a report.
std::string Watch::status(Clock::time_point now) const {
  const uint64_t step = steps_();
  const std::string in_step = step == 0 ? "" : "is in step " + std::to_string(step) + " and ";
  const std::string on_host = in_step + status_on_host(now);
  const auto launched = oldest_launched();
  return launched && now - launched->since > kLongOnGpu ? on_host + "; " + describe_launched(*launched, now) : on_host;
}

std::string Watch::status_on_host(Clock::time_point now) const {
  if (!operations_.executing().empty()) {
    return "is executing " + label_of(*operations_.executing().begin()->second->request);
  }
  if (operations_.join()) return "has joined";
  if (const size_t count = operations_.undecided(); count > 0) {
    const auto more = count > 1 ? " and " + std::to_string(count - 1) + " more" : std::string();
    return "waits for " + label_of(operations_.some_undecided()) + more;
  }
  if (last_submitted_ == nullptr) return "has not submitted anything yet";
  const auto idle = std::chrono::duration_cast<std::chrono::seconds>(now - last_news_).count();
  return "has nothing under way; it last submitted " + label_of(*last_submitted_) + ", and nothing for " +
         std::to_string(idle) + " s";
}

}  // namespace horovodish
