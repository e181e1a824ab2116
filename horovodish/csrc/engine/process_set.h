// A process set at work: some ranks of the world with a negotiation, a plane and an order of operations of their own.
// Sets share nothing but memory and the thread that drives them, so that one that waits never holds up another.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation_table.h"
#include "engine/stall_watch.h"
#include "memory/clock.h"
#include "negotiation/negotiation.h"
#include "negotiation/neighbours.h"
#include "negotiation/process_set_config.h"
#include "operation/operation.h"
#include "planes/carried_values.h"
#include "planes/pairs.h"
#include "planes/plane.h"

namespace horovodish {

class Engine;

class ProcessSet final : private OperationTable::Owner {
 public:
  // `engine` outlives the set.
  ProcessSet(ProcessSetConfig config, const EngineOptions& options, Engine& engine);

  // An exception in the functions that are noexcept ends this rank's part in the set: what it has under way fails, and the peers
  // are told why.
  void submit(const std::shared_ptr<Operation>& operation) noexcept;
  // One look at everything that can have moved; true when something has.
  bool turn() noexcept;
  // Whether news of neighbours matters now. One that has made room for what is unsent says so.
  bool awaits_news() const { return busy() || neighbours_.has_unsent(); }
  bool busy() const { return operations_.busy() || pairs_.busy(); }
  // Whether something is under way that moves only while this rank looks.
  bool polls() const { return (busy() && plane_ && plane_->needs_polling()) || (pairs_.busy() && config_.mpi); }
  // Takes a send or a receive back that has not begun to move; true if it has.
  bool cancel(const Handle& handle) { return pairs_.cancel(handle); }
  // How long the driver may sleep when nobody rings; nothing means for ever.
  std::optional<std::chrono::nanoseconds> nap() const;

  // To the root, which passes it on to all ranks.
  void send_note(const Note& note) noexcept;

  // Ends everything that this rank has under way and says farewell to the peers; advance_farewell() until it is true.
  void leave(bool failed, const std::string& reason) noexcept;
  // The same, of a rank that goes on in other sets. Turns send the farewell.
  void retire(const std::string& reason) noexcept;
  bool advance_farewell() noexcept;
  // Whether peers on other hosts may still need what MPI has taken from this rank but not sent yet.
  bool may_hold_data() const { return config_.mpi && !end_; }

  const std::map<WorldRank, Lateness>& lateness() const { return negotiation_.lateness(); }
  std::vector<Residuals::Report> code_reports() const { return plane_ ? plane_->code_reports() : code_reports_; }
  // What this rank and, at the root, the others wait for: lines of fields for launcher/status/answers.py.
  std::string describe_waits(Clock::time_point now) const { return stall_watch_.describe_waits(now); }
  // What this rank has sent, in all process sets, to each host of this one.
  std::string describe_sent() const;
  uint64_t full_requests() const { return negotiation_.full_requests(); }

 private:
  // What can still be carried out, and what becomes of the rest.
  struct EndOfSet {
    uint64_t decision;
    Error error;
    // A rank has left in order, which means that it has had its part in what was launched: until when this rank waits for its own.
    Clock::time_point wait_until = {};
  };
  // When and why the plane has failed.
  struct Broken {
    Clock::time_point since;
    std::string text;
  };

  template <class Step>
  void guarded(Step step) noexcept;
  void leave_if_failed() noexcept;
  void leave(const Lost& lost, const Error& error);
  bool advance();

  // What the table of operations asks for.
  void state(const std::shared_ptr<Operation>& operation) override;
  void settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept override;
  void submit_again(const std::shared_ptr<Operation>& operation) noexcept override { submit(operation); }

  // From the decision to the end.
  void exchange();
  void apply_decisions();
  void apply(const DecidedCollective& decided, Clock::time_point now);
  void apply(const Fail& failed, Clock::time_point now);
  void apply(const Joined& joined, Clock::time_point now);
  void apply(const Lost& lost, Clock::time_point now);
  void apply(const Note& note, Clock::time_point now);
  void answer_question(Clock::time_point now);
  std::shared_ptr<Operation> operation_for_joined(const DecidedCollective& decided, Clock::time_point now);
  bool advance_plane();
  void end(const std::shared_ptr<Operation>& operation, const Error* error);
  uint64_t finished() const;

  // When a rank is lost.
  void end_plane();
  void end_plane_because_of(const Error& error);
  void fail_everywhere(const Lost& lost);

  const ProcessSetConfig config_;
  const EngineOptions options_;
  Engine& engine_;
  Neighbours neighbours_;
  Negotiation negotiation_;
  const CarriedValues carried_;
  std::unique_ptr<Plane> plane_;  // null once it has come to its end after a loss
  std::vector<Residuals::Report> code_reports_;  // what the plane had encoded then

  Pairs pairs_;
  OperationTable operations_;
  StallWatch stall_watch_;

  std::optional<EndOfSet> end_;  // once a rank is lost
  std::exception_ptr failure_;  // what a step of this set has thrown
  bool said_farewell_ = false;
  std::optional<Broken> broken_;

  Clock::time_point last_progress_{};
  std::optional<Note::Topic> question_;  // of the root's, not answered yet
  std::optional<Clock::time_point> last_note_;  // about launches
};

}  // namespace horovodish
