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
#include "memory/arena.h"
#include "memory/peer_watch.h"
#include "negotiation/negotiation.h"
#include "negotiation/neighbours.h"
#include "negotiation/process_set_config.h"
#include "operation/operation.h"
#include "planes/carried_values.h"
#include "planes/plane.h"

namespace horovodish {

class ProcessSet final : private OperationTable::Owner {
 public:
  using Clock = std::chrono::steady_clock;
  using MakePlane =
      std::function<std::unique_ptr<Plane>(const ProcessSetConfig&, const Plane::OnComplete&, const Plane::OnRefuse&)>;

  class Owner {
   public:
    virtual ~Owner() = default;
    // Every operation ends once, with an error or none.
    virtual void settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept = 0;
    // A note that is not for the process set itself.
    virtual void announced(const Note& note) = 0;
    // Nothing is decided any more, for this reason.
    virtual void decisions_ended(int process_set, const std::string& why) = 0;
    // How many steps this rank has begun.
    virtual uint64_t steps() const noexcept = 0;
  };

  // `arena` and `watch` may be null where this rank is alone on its host. They and `owner` outlive the set.
  ProcessSet(ProcessSetConfig config, const EngineOptions& options, Arena* arena, const PeerWatch* watch,
             const MakePlane& make_plane, Owner& owner);

  // An exception in the functions that are noexcept ends this rank's part in the set: what it has under way fails, and the peers
  // are told why.
  void submit(const std::shared_ptr<Operation>& operation) noexcept;
  // One look at everything that can have moved; true when something has.
  bool turn() noexcept;
  // `submits_nothing`: before the next decision, because every thread waits in this set. If that ends, this rank says so.
  void flush(bool submits_nothing) noexcept;
  // See Watch.
  bool is_quiet() const { return watch_.is_quiet(); }
  Clock::duration quiet_for() const { return watch_.quiet_for(); }
  // Whether news of neighbours matters now. One that has made room for what is unsent says so.
  bool awaits_news() const { return busy() || neighbours_.has_unsent(); }
  bool busy() const { return operations_.busy(); }
  // Whether something is under way that moves only while this rank looks.
  bool polls() const { return busy() && plane_ && plane_->needs_polling(); }
  // How long the driver may sleep when nobody rings; nothing means for ever.
  std::optional<std::chrono::nanoseconds> nap() const;

  // To the root, which announces it to all ranks.
  void say(const Note& note) noexcept;

  // Ends everything that this rank has under way and says farewell to the peers; advance_farewell() until it is true.
  void leave(bool failed, const std::string& reason) noexcept;
  bool advance_farewell() noexcept;
  // Whether peers on other hosts may still need what MPI has taken from this rank but not sent yet.
  bool may_hold_data() const { return config_.mpi && !last_; }

  const std::map<WorldRank, Lateness>& lateness() const { return negotiation_.lateness(); }
  uint64_t full_requests() const { return negotiation_.full_requests(); }
  WorldRank world_rank() const { return config_.world_rank(config_.own); }
  size_t region() const { return config_.region; }

 private:
  // What can still be carried out, and what becomes of the rest.
  struct Last {
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
  void apply_said(const Note& note);
  void apply_announced(const Note& note, Clock::time_point now);
  void execute(const Decision& decision, Clock::time_point now);
  std::shared_ptr<Operation> operation_for_joined(const Decision& decision, Clock::time_point now);
  bool advance_plane();
  void complete(const std::shared_ptr<Operation>& operation);
  void refuse(const std::shared_ptr<Operation>& operation, const Error& error);
  uint64_t finished() const;

  // When a rank is lost.
  void apply_lost(const Decision& lost);
  void end_plane();
  void end_plane_because_of(const Error& error);
  void fail_everywhere(const Lost& lost);

  const ProcessSetConfig config_;
  const EngineOptions options_;
  Owner& owner_;
  Neighbours neighbours_;
  Negotiation negotiation_;
  const CarriedValues carried_;
  std::unique_ptr<Plane> plane_;  // null once it has come to its end after a loss

  OperationTable operations_;
  Watch watch_;

  std::optional<Last> last_;  // once a rank is lost
  std::exception_ptr failure_;  // what a step of this set has thrown
  bool said_farewell_ = false;
  std::optional<Broken> broken_;

  Clock::time_point last_progress_{};
  std::optional<Clock::time_point> last_announced_;  // to the owner
};

}  // namespace horovodish
