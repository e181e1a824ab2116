// A process set at work: some ranks of the world with a negotiation, a plane and an order of operations of their own.
// Sets share nothing but memory and the thread that drives them, so that one that waits never holds up another.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation_table.h"
#include "engine/watch.h"
#include "gpu/launch_order.h"
#include "memory/arena.h"
#include "memory/peer_watch.h"
#include "negotiation/negotiation.h"
#include "negotiation/neighbours.h"
#include "negotiation/process_set_config.h"
#include "operation/operation.h"
#include "planes/plane.h"

namespace horovodish {

class ProcessSet final : private OperationTable::Owner {
 public:
  using Clock = std::chrono::steady_clock;
  // Called once for every operation, with its error or none. Throws nothing.
  using Settle = std::function<void(const std::shared_ptr<Operation>&, const Error*)>;
  // Called with a process set and the number of a decision of its own: its first rank asks for a turn; the global set has
  // given it one.
  using Turn = std::function<void(int, uint64_t)>;

  // `arena` and `watch` may be null where this rank is alone on its host. They and `order` outlive the set.
  ProcessSet(ProcessSetConfig config, const EngineOptions& options, Arena* arena, const PeerWatch* watch,
             LaunchOrder& order, Settle settle, Turn ask_turn, Turn give_turn);

  // An exception in the functions that are noexcept ends this rank's part in the set: what it has under way fails, and the peers
  // are told why.
  void submit(const std::shared_ptr<Operation>& operation) noexcept;
  // One look at everything that can have moved; true when something has.
  bool turn() noexcept;
  // `all_threads_wait`: in this set, so this rank submits nothing more before the next decision. If that ends, it says so.
  void flush(bool all_threads_wait) noexcept;
  // Whether news of neighbours matters now. One that has made room for what is unsent says so.
  bool awaits_news() const { return busy() || neighbours_.has_unsent(); }
  bool busy() const { return operations_.busy(); }
  // Whether something is under way that moves only while this rank looks.
  bool polls() const { return busy() && plane_ && plane_->needs_polling(); }
  // How long the driver may sleep when nobody rings; nothing means for ever.
  std::optional<std::chrono::nanoseconds> nap() const;

  // Of the global set: asks for a turn for a decision of another one.
  void ask_turn(int process_set, uint64_t decision) noexcept;
  // The turn of an operation of this set has come up.
  void add_turn(uint64_t decision);

  // Ends everything that this rank has under way and says farewell to the peers; advance_farewell() until it is true.
  void leave(bool failed, const std::string& reason) noexcept;
  bool advance_farewell() noexcept;
  // Whether peers on other hosts may still need what MPI has taken from this rank but not sent yet.
  bool may_hold_data() const { return config_.mpi && !last_; }

  const std::map<int, Lateness>& lateness() const { return negotiation_.lateness(); }
  uint64_t full_requests() const { return negotiation_.full_requests(); }
  int world_rank() const { return config_.world_rank(config_.own); }
  size_t region() const { return config_.region; }

 private:
  // What can still be carried out, and what becomes of the rest.
  struct Last {
    uint64_t decision;
    Error error;
  };
  // When and why the plane has failed.
  struct Broken {
    Clock::time_point since;
    std::string text;
  };

  template <class Step>
  void guarded(Step step) noexcept;
  void leave_because_of(const std::exception_ptr& failure) noexcept;
  void leave(const Lost& lost, const Error& error);
  bool advance();

  // What the table of operations asks for.
  void state(const std::shared_ptr<Operation>& operation) override;
  void settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept override;
  void submit_again(const std::shared_ptr<Operation>& operation) noexcept override { submit(operation); }

  // From the decision to the end.
  void exchange();
  void apply_decisions();
  void execute(const Decision& decision, Clock::time_point now);
  std::shared_ptr<Operation> neutral(const Decision& decision, Clock::time_point now);
  void take_turn(uint64_t decision);
  bool advance_plane();
  void complete(const std::shared_ptr<Operation>& operation);
  void refuse(const std::shared_ptr<Operation>& operation, const Error& error);
  uint64_t finished() const;

  // When a rank is lost.
  void apply_lost(const Decision& lost);
  void end_plane();
  void fail_everywhere(const Lost& lost);

  const ProcessSetConfig config_;
  const EngineOptions options_;
  LaunchOrder& order_;
  const Settle settle_;
  const Turn ask_turn_, give_turn_;
  Neighbours neighbours_;
  Negotiation negotiation_;
  std::unique_ptr<Plane> plane_;  // null once it has come to its end after a loss

  OperationTable operations_;
  Watch watch_;

  std::optional<Last> last_;  // once a rank is lost
  std::exception_ptr failure_;  // what a step of this set has thrown
  bool said_farewell_ = false;
  std::optional<Broken> broken_;

  Clock::time_point last_progress_{};
  std::optional<Clock::time_point> last_turn_;  // when an operation of another set was last given one
};

}  // namespace horovodish
