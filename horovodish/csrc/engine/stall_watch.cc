#include "engine/stall_watch.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <utility>

#include "negotiation/shared_clock.h"
#include "operation/warning.h"

namespace horovodish {

namespace {

constexpr const char* kRemedies =
    "\nRemedy: call the same collectives under the same names on every rank. Usual causes: the ranks have different "
    "numbers of batches (use a sampler that gives all the same number, or call hvd.join() after a rank's last batch; "
    "in Keras, pass the same hvd.callbacks to fit() on every rank) or of epochs, they have built different models, one "
    "of them skips a step whose loss is not finite, or a collective is called under `if rank == 0:`.";

constexpr const char* kStacksHint =
    "\nWith `horovodish run --stall-check-stacks`, a late rank shows where its script is.";

// How many undecided operations of a rank `horovodish status` shows.
constexpr size_t kShownWaits = 64;

// A rank's status mentions an operation on its GPU if none has ended for this long.
constexpr std::chrono::seconds kLongOnGpu{1};

constexpr const char* kPairsRemedy =
    ". Remedy: each receive needs a send with its tag on the other rank, and a large send needs its receive.";

StallWatch::Inspection stall(std::string text) { return {.lost = Lost{.loss = Loss::stall, .text = std::move(text)}}; }

// The ranks that the root asks, see StallInspector.
RankSet asked_ranks(const ProcessSetConfig& config, const Neighbours& neighbours) {
  RankSet ranks;
  for (const WorldRank rank : config.ranks) ranks.add(RankSet(rank));
  return neighbours.at_root() ? ranks : RankSet();
}

// A line of fields with tabs between them. Users choose tensor names, so control characters are replaced.
std::string line_of(std::initializer_list<std::string> fields) {
  std::string line;
  for (std::string field : fields) {
    std::ranges::replace_if(field, [](unsigned char c) { return c < ' ' || c == 0x7F; }, '?');
    line += (line.empty() ? "" : "\t") + field;
  }
  return line + "\n";
}

std::string text_of_seconds(Clock::duration duration) {
  return std::to_string(std::chrono::duration<double>(duration).count());
}

}  // namespace

StallWatch::StallWatch(const ProcessSetConfig& config, const EngineOptions& options, Negotiation& negotiation,
                       Neighbours& neighbours, const OperationTable& operations, Pairs& pairs,
                       const std::unique_ptr<Plane>& plane, const LaunchedOperations& launched_operations,
                       const std::atomic<uint64_t>& steps)
    : config_(config),
      options_(options),
      negotiation_(negotiation),
      neighbours_(neighbours),
      operations_(operations),
      pairs_(pairs),
      plane_(plane),
      launched_operations_(launched_operations),
      steps_(steps),
      stall_(options_.stall, asked_ranks(config_, neighbours_)),
      launched_stall_(options_.stall, asked_ranks(config_, neighbours_)) {}

void StallWatch::submitted(const Operation& operation, Clock::time_point now) {
  last_news_ = now;
  if (operation.request->kind == Kind::join) return;
  ++news_;
  last_submitted_ = operation.request;
}

void StallWatch::decided(Clock::time_point now) {
  last_news_ = now;
  ++news_;
}

void StallWatch::on_status_question(bool about_gpus, bool waits, Clock::time_point now) {
  if (!neighbours_.at_root()) ++(about_gpus ? questions_about_gpus_ : news_);
  const auto warning = options_.stall.warning;
  const bool lags = warning.count() > 0 && now - last_news_ > warning && operations_.undecided() == 0 &&
                    operations_.executing().empty() && !pairs_.busy() && oldest_launched() == nullptr;
  if (options_.stack_signal != 0 && lags && std::exchange(stacks_shown_, last_news_) != last_news_) {
    warn("other ranks wait for " + text_of(config_.own_rank()) + ". The Python stacks of its threads:");
    kill(getpid(), options_.stack_signal);
  }
  negotiation_.note_to_root({.topic = Note::Topic::status,
                             .rank = config_.own_rank(),
                             .decision = negotiation_.decisions_seen(),
                             .waits = waits,
                             .text = status(now),
                             .labels = operations_.labels()});
}

void StallWatch::on_status(const Note& answer) {
  stall_.on_status(answer);
  launched_stall_.on_status(answer);
}

StallWatch::Inspection StallWatch::inspect() {
  const Clock::time_point now = Clock::now();
  if (now < next_inspection_) return {};
  next_inspection_ = now + std::chrono::duration_cast<Clock::duration>(stall_.interval() / 2);
  for (const auto inspect : {&StallWatch::inspect_waiting, &StallWatch::inspect_launched, &StallWatch::inspect_pairs,
                             &StallWatch::inspect_deadlock}) {
    Inspection found = (this->*inspect)(now);
    if (found.asks || found.lost) return found;
  }
  return {};
}

StallWatch::Inspection StallWatch::inspect_waiting(Clock::time_point now) {
  // The root may be asleep without work, and then does not know that a rank waits for it.
  if (!neighbours_.at_root() && waiting() && now - last_news_ > stall_.interval()) neighbours_.nudge_parent();
  return act(stall_.look(now, waiting()), Note::Topic::ask_status, [&] {
    if (neighbours_.at_root()) return stall_.report(now, describe_waiting());
    return stall_.report_silence(now, config_.own_rank(), status(now), neighbours_.parent_rank(), config_.ranks[0]);
  });
}

// An operation may end on one rank's GPU and not on another's, such as a broadcast at its root. So every rank watches
// its own GPU. The root asks all ranks. Another rank speaks for itself where the root does not ask.
StallWatch::Inspection StallWatch::inspect_launched(Clock::time_point now) {
  const Plane::Launched* const launched = oldest_launched();
  const auto number = launched != nullptr ? std::optional(launched->number + questions_about_gpus_) : std::nullopt;
  return act(launched_stall_.look(now, number), Note::Topic::ask_status_of_gpus, [&] {
    if (!neighbours_.at_root()) return describe_launched(*launched, now);
    return launched_stall_.report(now, label_of(*launched->request) + " was launched on the GPUs and has not ended");
  });
}

StallWatch::Inspection StallWatch::act(StallInspector::Action action, Note::Topic question,
                                       const std::function<std::string()>& report) {
  const bool asks = action == StallInspector::Action::ask && neighbours_.at_root();
  if (asks) negotiation_.note_to_all({.topic = question});
  const std::string hint = options_.stack_signal == 0 ? kStacksHint : "";
  if (action == StallInspector::Action::give_up) return stall(report() + hint);
  if (action == StallInspector::Action::report) warn(report() + hint);
  return {.asks = asks};
}

// Every rank watches its own transfers: the other ranks need not know of a send or a receive.
StallWatch::Inspection StallWatch::inspect_pairs(Clock::time_point now) {
  const auto inspect = [&](StallInspector::Seconds limit, bool only_new) {
    if (limit.count() <= 0) return std::string();
    const std::string found = pairs_.waiting(now, std::chrono::duration_cast<Clock::duration>(limit), only_new);
    return found.empty() ? found : text_of(config_.own_rank()) + " waits in " + found + kPairsRemedy;
  };
  if (const std::string text = inspect(options_.stall.shutdown, false); !text.empty()) return stall(text);
  if (const std::string text = inspect(options_.stall.warning, true); !text.empty()) warn(text);
  return {};
}

// At the root: ends operations that no rank can complete. If the user has turned the stall check off, it only warns.
StallWatch::Inspection StallWatch::inspect_deadlock(Clock::time_point) {
  if (!negotiation_.anything_pending() || !stall_.all_wait(negotiation_.decisions_seen())) return {};
  if (std::exchange(warned_at_, news_) == news_) return {};
  std::string text = "every rank waits, but not for the same tensors, so none can continue: " +
                     negotiation_.describe_pending(stall_.labels()) + kRemedies;
  if (options_.stall.warning + options_.stall.shutdown > StallInspector::Seconds(0)) return stall(std::move(text));
  warn(text);
  return {};
}

std::optional<std::chrono::nanoseconds> StallWatch::nap() const {
  using Nanoseconds = std::chrono::nanoseconds;
  const bool waits = negotiation_.anything_pending() || negotiation_.any_joined() || !operations_.executing().empty() ||
                     pairs_.busy() || (oldest_launched() != nullptr);
  return waits ? std::optional(std::chrono::duration_cast<Nanoseconds>(stall_.interval())) : std::nullopt;
}

// A number for the operation that has waited longest. It stays the same while nothing moves.
std::optional<uint64_t> StallWatch::waiting() const {
  const bool executes = !operations_.executing().empty();
  if (!neighbours_.at_root()) return operations_.busy() ? std::optional(news_) : std::nullopt;
  if (const auto oldest = negotiation_.oldest()) return oldest;
  if (!executes && !negotiation_.any_joined()) return std::nullopt;
  return std::numeric_limits<uint64_t>::max() - news_;
}

// At the root.
std::string StallWatch::describe_waiting() const {
  std::string text = negotiation_.describe_pending(stall_.labels());
  if (operations_.executing().empty()) return text;
  if (!text.empty()) text += "; ";
  return text + label_of(*operations_.executing().begin()->second->request) + " has begun but not ended";
}

const Plane::Launched* StallWatch::oldest_launched() const { return plane_ ? plane_->oldest_launched() : nullptr; }

// An operation waits for its inputs on streams of the framework, and for earlier operations of all process sets.
bool StallWatch::has_started(const Plane::Launched& launched) const {
  return launched_operations_.is_next(launched.number) && launched.has_inputs();
}

std::string StallWatch::describe_launched(const Plane::Launched& launched, Clock::time_point now) const {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - launched.since).count();
  return label_of(*launched.request) + " was launched on the GPU of " + text_of(config_.own_rank()) + " " +
         std::to_string(seconds) + " s ago and has not ended: " +
         (has_started(launched) ? "this GPU has started it, and waits for another rank's GPU or hangs"
                                : "this GPU has not started it, and still computes earlier work");
}

// What this rank is doing, for a report.
std::string StallWatch::status(Clock::time_point now) const {
  const uint64_t step = steps_;
  const std::string in_step = step == 0 ? "" : "is in step " + std::to_string(step) + " and ";
  const std::string on_host = in_step + status_on_host(now);
  const Plane::Launched* const launched = oldest_launched();
  const bool is_long = launched != nullptr && launched_operations_.without_end(now) > kLongOnGpu;
  return is_long ? on_host + "; " + describe_launched(*launched, now) : on_host;
}

std::string StallWatch::describe_waits(Clock::time_point now) const {
  const std::string set = std::to_string(config_.id);
  std::string text = line_of({"does", set, status_on_host(now)});
  const auto say = [&](const char* what, const Operation& operation) {
    const Request& request = *operation.request;
    text += line_of({what, set, text_of_seconds(now - operation.since), request.name, subject_of(request)});
  };
  for (const auto& [decision, operation] : operations_.executing()) {
    if (operation->since != Clock::time_point{}) say("executes", *operation);  // else this rank has joined
  }
  for (const Operation* operation : operations_.oldest_undecided(kShownWaits)) say("waits", *operation);
  if (operations_.join()) {
    text += line_of({"waits", set, text_of_seconds(now - operations_.join()->since), "", "join()"});
  }
  if (const std::string transfer = pairs_.waiting(now, {}, false); !transfer.empty()) {
    text += line_of({"transfer", set, transfer});
  }
  if (const auto* const launched = oldest_launched();
      launched != nullptr && launched_operations_.is_next(launched->number)) {
    const Request& request = *launched->request;
    text +=
        line_of({"gpu", set, text_of_seconds(launched_operations_.without_end(now)), request.name, subject_of(request),
                 text_of_seconds(now - launched->since), has_started(*launched) ? "started" : "behind"});
  }
  if (!neighbours_.at_root()) return text;
  const auto labels = stall_.labels();
  for (const auto& [name, signature, submitted, missing, since_seconds] : negotiation_.awaited()) {
    const auto label = labels.find(name);
    const Request request = signature.empty() ? Request() : Request::decode(signature);
    const std::string call = signature.empty()       ? "join()"
                             : label == labels.end() ? subject_of(request)
                                                     : std::string(name_of(request.kind)) + " of " + label->second;
    const double seconds = since_seconds > 0 ? shared_seconds(now) - since_seconds : 0;
    text += line_of({"missing", set, std::to_string(seconds), name, call, submitted.text(), missing.text()});
  }
  return text;
}

std::string StallWatch::status_on_host(Clock::time_point now) const {
  if (!operations_.executing().empty()) {
    return "is executing " + label_of(*operations_.executing().begin()->second->request);
  }
  if (operations_.join()) return "has joined";
  const std::string transfer = pairs_.waiting(now, {}, false);
  if (const size_t count = operations_.undecided(); count > 0) {
    const std::string operations = count > 2 ? " more operations" : " more operation";
    const auto more = count > 1 ? " and " + std::to_string(count - 1) + operations : std::string();
    return "waits for " + label_of(operations_.some_undecided()) + more +
           (transfer.empty() ? "" : " and in " + transfer);
  }
  if (!transfer.empty()) return "waits in " + transfer;
  if (last_submitted_ == nullptr) return "has not submitted anything yet";
  const auto idle = std::chrono::duration_cast<std::chrono::seconds>(now - last_news_).count();
  const std::string nothing =
      oldest_launched() != nullptr ? "last submitted " : "has nothing under way; it last submitted ";
  return nothing + label_of(*last_submitted_) + ", and nothing for " + std::to_string(idle) + " s";
}

}  // namespace horovodish
