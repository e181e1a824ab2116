// A process set at work: some ranks of the world, with their own negotiation, plane and order of operations. Sets share
// only memory and the thread that drives them, so a waiting set never delays another one.
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

  // An exception in a noexcept function ends this rank's part in the set: its operations under way fail, and the peers
  // hear the reason.
  void submit(const std::shared_ptr<Operation>& operation) noexcept;
  // Looks once at everything that can have moved. Returns true if anything has.
  bool turn() noexcept;
  // Returns whether news of neighbours matters now. A neighbour also sends news when it has made room for unsent
  // messages.
  bool awaits_news() const { return busy() || neighbours_.has_unsent(); }
  bool busy() const { return operations_.busy() || pairs_.busy(); }
  // Returns whether something is under way that moves only while this rank looks.
  bool polls() const { return (busy() && plane_ && plane_->needs_polling()) || (pairs_.busy() && config_.mpi); }
  // Takes back a send or a receive that has not begun to move. Returns true if it did.
  bool cancel(const Handle& handle) { return pairs_.cancel(handle); }
  // How long the driver may sleep if nobody rings; none: for ever.
  std::optional<std::chrono::nanoseconds> nap() const;

  // Sends a note to the root, which passes it on to all ranks.
  void send_note(const Note& note) noexcept;

  // Ends everything that this rank has under way, and says farewell to the peers. Call advance_farewell() until it
  // returns true.
  void leave(bool failed, const std::string& reason) noexcept;
  // The same for a rank that goes on in other sets. Turns send the farewell.
  void retire(const std::string& reason) noexcept;
  bool advance_farewell() noexcept;
  // Returns whether peers on other hosts may still need data that MPI has taken from this rank but not sent yet.
  bool may_hold_data() const { return config_.mpi && !end_; }

  const std::map<WorldRank, Lateness>& lateness() const { return negotiation_.lateness(); }
  std::vector<Residuals::Report> code_reports() const { return plane_ ? plane_->code_reports() : code_reports_; }
  // The waits of this rank and, at the root, of the other ranks: lines of fields for launcher/status/answers.py.
  std::string describe_waits(Clock::time_point now) const { return stall_watch_.describe_waits(now); }
  // The bytes that this rank has sent, in all process sets, to each host of this set.
  std::string describe_sent() const;
  uint64_t full_requests() const { return negotiation_.full_requests(); }

 private:
  // Which operations can still be carried out, and the error of the others.
  struct EndOfSet {
    uint64_t decision;
    Error error;
    // After a rank has left without an error: that rank has done its part in launched operations, so this rank waits
    // for its own until then.
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

  // The calls of the operation table.
  void state(const std::shared_ptr<Operation>& operation) override;
  void settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept override;
  void submit_again(const std::shared_ptr<Operation>& operation) noexcept override { submit(operation); }

  // From the decision on an operation to its end.
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

  // After the loss of a rank.
  void end_plane();
  void end_plane_because_of(const Error& error);
  void fail_everywhere(const Lost& lost);

  const ProcessSetConfig config_;
  const EngineOptions options_;
  Engine& engine_;
  Neighbours neighbours_;
  Negotiation negotiation_;
  const CarriedValues carried_;
  std::unique_ptr<Plane> plane_;  // null after the plane has ended because of a loss
  std::vector<Residuals::Report> code_reports_;  // the plane's reports at that time

  Pairs pairs_;
  OperationTable operations_;
  StallWatch stall_watch_;

  std::optional<EndOfSet> end_;  // once a rank is lost
  std::exception_ptr failure_;  // the exception of a step of this set
  bool said_farewell_ = false;
  std::optional<Broken> broken_;

  Clock::time_point last_progress_{};
  std::optional<Note::Topic> question_;  // the root's question, not answered yet
  std::optional<Clock::time_point> last_note_;  // the last note about launches
};

}  // namespace horovodish
