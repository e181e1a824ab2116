// Looks for ranks of a process set that wait too long. The root of the negotiation asks all ranks and speaks for them.
// Another rank speaks for itself, and only if the root does not answer. stall.h decides when.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/operation_table.h"
#include "memory/clock.h"
#include "negotiation/negotiation.h"
#include "negotiation/neighbours.h"
#include "negotiation/process_set_config.h"
#include "negotiation/stall.h"
#include "planes/nccl/launched_operations.h"
#include "planes/pairs.h"
#include "planes/plane.h"

namespace horovodish {

class StallWatch {
 public:
  // All arguments outlive this object. `plane`: null after it has ended. `steps`: how many steps this rank has begun.
  StallWatch(const ProcessSetConfig& config, const EngineOptions& options, Negotiation& negotiation,
             Neighbours& neighbours, const OperationTable& operations, Pairs& pairs,
             const std::unique_ptr<Plane>& plane, const LaunchedOperations& launched_operations,
             const std::atomic<uint64_t>& steps);

  // What this rank does, and what it hears of the others.
  void submitted(const Operation& operation, Clock::time_point now);
  void decided(Clock::time_point now);
  void moved() { ++news_; }
  // The root asks what this rank is doing. Answers, and shows the Python stacks if the others wait for this rank.
  // `about_gpus`: an operation on the root's GPU takes long. `waits`: see Note.
  void on_status_question(bool about_gpus, bool waits, Clock::time_point now);
  void on_status(const Note& answer);

  struct Inspection {
    bool asks = false;  // this rank has asked the others
    std::optional<Lost> lost = {};  // why everything under way must fail
  };
  // Call it while nothing moves.
  Inspection inspect();
  // See ProcessSet.
  std::string describe_waits(Clock::time_point now) const;
  // The time until the next inspection; none while nothing waits.
  std::optional<std::chrono::nanoseconds> nap() const;

 private:
  // Does what a StallInspector wants. `report`: gives the text of a report.
  Inspection act(StallInspector::Action action, Note::Topic question, const std::function<std::string()>& report);
  Inspection inspect_waiting(Clock::time_point now);
  Inspection inspect_launched(Clock::time_point now);
  Inspection inspect_pairs(Clock::time_point now);
  Inspection inspect_deadlock(Clock::time_point now);
  std::optional<uint64_t> waiting() const;
  std::string describe_waiting() const;
  const Plane::Launched* oldest_launched() const;
  bool has_started(const Plane::Launched& launched) const;
  std::string describe_launched(const Plane::Launched& launched, Clock::time_point now) const;
  std::string status(Clock::time_point now) const;
  std::string status_on_host(Clock::time_point now) const;

  const ProcessSetConfig& config_;
  const EngineOptions& options_;
  Negotiation& negotiation_;
  Neighbours& neighbours_;
  const OperationTable& operations_;
  Pairs& pairs_;
  const std::unique_ptr<Plane>& plane_;
  const LaunchedOperations& launched_operations_;
  const std::atomic<uint64_t>& steps_;
  StallInspector stall_;
  StallInspector launched_stall_;  // the same for launched operations
  Clock::time_point next_inspection_{};
  uint64_t news_ = 0;  // counts submissions, decisions and movements, and at other ranks the root's questions
  uint64_t questions_about_gpus_ = 0;  // the root's questions about GPUs, at other ranks
  Clock::time_point last_news_{};  // the last submission or decision
  Clock::time_point stacks_shown_ = Clock::time_point::max();  // the last_news_ at which the stacks were shown
  std::shared_ptr<const Request> last_submitted_;
  uint64_t warned_at_ = 0;  // the news_ at which the last warning of a deadlock came
};

}  // namespace horovodish
