// Looks for ranks of a process set that wait for too long. The root of the negotiation asks all of them and speaks for all; another
// rank speaks for itself, and only where the root does not answer. stall.h decides when.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/operation_table.h"
#include "negotiation/negotiation.h"
#include "negotiation/neighbours.h"
#include "negotiation/process_set_config.h"
#include "negotiation/stall.h"
#include "planes/plane.h"

namespace horovodish {

class Watch {
 public:
  using Clock = std::chrono::steady_clock;

  // All of them outlive it. `plane`: null once it has come to its end. `steps`: how many steps this rank has begun.
  Watch(const ProcessSetConfig& config, const EngineOptions& options, Negotiation& negotiation, Neighbours& neighbours,
        const OperationTable& operations, const std::unique_ptr<Plane>& plane, std::function<uint64_t()> steps);

  // What this rank does, and what it hears of the others.
  void submitted(const Operation& operation, Clock::time_point now);
  void decided(Clock::time_point now);
  void moved() { ++news_; }
  // Whether nothing was submitted or decided for the stall warning time, or for the shutdown time where there is no other.
  bool is_quiet() const;
  // For how long nothing was submitted or decided.
  Clock::duration quiet_for() const { return Clock::now() - last_news_; }
  // Every rank waits, and nothing can be decided, as `text` says.
  void stuck(const std::string& text);
  // The root asks what this rank is doing: tells it, and shows the Python stacks of a rank that the others wait for.
  // `about_gpus`: an operation on the root's GPU takes long.
  void asked(bool about_gpus, Clock::time_point now);
  void told(WorldRank rank, const std::string& text);

  struct Inspection {
    bool asks = false;  // this rank has asked the others
    std::optional<Lost> lost = {};  // why everything that is under way is to be given up
  };
  // While nothing moves.
  Inspection inspect();
  // After which time to look again; none while nothing waits.
  std::optional<std::chrono::nanoseconds> nap() const;

 private:
  Inspection inspect_waiting(Clock::time_point now);
  Inspection inspect_launched(Clock::time_point now);
  Inspection inspect_stuck();
  std::optional<uint64_t> waiting() const;
  std::string describe_waiting() const;
  std::optional<Plane::Launched> oldest_launched() const;
  std::string describe_launched(const Plane::Launched& launched, Clock::time_point now) const;
  std::string status(Clock::time_point now) const;
  std::string status_on_host(Clock::time_point now) const;

  const ProcessSetConfig& config_;
  const EngineOptions& options_;
  Negotiation& negotiation_;
  Neighbours& neighbours_;
  const OperationTable& operations_;
  const std::unique_ptr<Plane>& plane_;
  const std::function<uint64_t()> steps_;
  std::optional<StallInspector> stall_;  // unless nobody wants to know
  std::optional<StallInspector> launched_stall_;  // the same for what GPUs have been given
  Clock::time_point next_inspection_{};
  uint64_t news_ = 0;  // counts submissions, decisions and movements, and at other ranks the root's questions
  uint64_t questions_about_gpus_ = 0;  // of the root's, at other ranks
  Clock::time_point last_news_{};  // the last submission or decision
  Clock::time_point stacks_shown_ =
      Clock::time_point::max();  // the last_news_ of the idle time for which they were shown
  std::shared_ptr<const Request> last_submitted_;
  std::string stuck_text_;  // empty unless every rank waits and nothing can be decided
  Clock::time_point stuck_since_{};
};

}  // namespace horovodish
