// A process set at work: some ranks of the world with a negotiation, a plane and an order of operations of their own.
// Sets share nothing but memory and the thread that drives them, so that one that waits never holds up another.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "families.h"
#include "launch_order.h"
#include "negotiation.h"
#include "neighbours.h"
#include "operation.h"
#include "peer_watch.h"
#include "planes/plane.h"
#include "process_set_config.h"
#include "stall.h"

namespace horovodish {

class ProcessSet {
 public:
  using Clock = std::chrono::steady_clock;
  // Called once for every operation, with its error or none.
  using Settle = std::function<void(const std::shared_ptr<Operation>&, const Error*)>;
  // Called with a process set and the number of a decision of its own: its first rank asks for a turn; the global set has
  // given it one.
  using Turn = std::function<void(int, uint64_t)>;

  // `arena` and `watch` may be null where this rank is alone on its host. They and `order` outlive the set.
  ProcessSet(ProcessSetConfig config, const EngineOptions& options, Arena* arena, const PeerWatch* watch,
             LaunchOrder& order, Settle settle, Turn ask_turn, Turn give_turn);

  void submit(std::shared_ptr<Operation> operation);
  // One look at everything that can have moved; true when something has.
  bool turn();
  // A caller waits for something of this set.
  void flush() { negotiation_.flush(); }
  // Whether news of neighbours matters now. One that has made room for what is unsent says so.
  bool awaits_news() const { return busy() || neighbours_.has_unsent(); }
  bool busy() const { return !undecided_.empty() || families_.hold_any() || !executing_.empty() || join_; }
  // Whether something is under way that moves only while this rank looks.
  bool polls() const { return busy() && plane_ && plane_->needs_polling(); }
  // How long the driver may sleep when nobody rings; nothing means for ever.
  std::optional<std::chrono::nanoseconds> nap() const;

  // Of the global set: asks for a turn for a decision of another one.
  void ask_turn(int process_set, uint64_t decision);

  // Ends everything that this rank has under way and says farewell to the peers; advance_farewell() until it is true.
  void leave(bool failed, const std::string& reason, const Error& error);
  bool advance_farewell() { return neighbours_.advance_farewell(); }

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

  // Before the decision.
  bool name_in_use(const Request& request) const;
  void refuse_name(const std::shared_ptr<Operation>& operation);
  void submit_next(const std::string& name);
  void fail(const std::string& name, const Error& error);
  void fail_family(const std::string& family, const Decision& decision);
  void abandon_undecided(const Error& error);

  // From the decision to the end.
  void apply_decisions();
  void execute(const Decision& decision);
  std::shared_ptr<Operation> neutral(const std::string& signature) const;
  void take_turn(uint64_t decision);
  bool advance_plane();
  void complete(const std::shared_ptr<Operation>& operation);
  void refuse(const std::shared_ptr<Operation>& operation, const Error& error);
  void settle(const std::shared_ptr<Operation>& operation, const Error* error);
  uint64_t finished() const;
  void abandon_executing(const Error& error);

  // When a rank is lost.
  void apply_lost(const Decision& lost);
  void end_plane();
  void fail_everywhere(const Lost& lost);

  // While nothing moves.
  void inspect();
  void inspect_as_root(StallInspector::Action action, Clock::time_point now);
  void inspect_as_other(StallInspector::Action action, Clock::time_point now);
  std::optional<uint64_t> waiting() const;
  std::string describe_waiting() const;
  std::string status() const;
  void report_stuck();

  const ProcessSetConfig config_;
  const EngineOptions options_;
  LaunchOrder& order_;
  const Settle settle_;
  const Turn ask_turn_, give_turn_;
  Neighbours neighbours_;
  Negotiation negotiation_;
  std::unique_ptr<Plane> plane_;  // null once it has come to its end after a loss

  Families families_;
  std::unordered_map<std::string, std::shared_ptr<Operation>> undecided_;
  // By name, what waits for an undecided operation of that name: after a refusal the caller may use the name again before
  // all ranks know of it, and a rank may refuse a second operation while the first one is under way.
  std::unordered_map<std::string, std::deque<std::shared_ptr<Operation>>> behind_;
  std::map<uint64_t, std::shared_ptr<Operation>> executing_;  // by the number of its decision
  std::shared_ptr<Operation> join_;  // null when this rank has not joined

  std::optional<Last> last_;  // once a rank is lost
  std::optional<Broken> broken_;

  std::optional<StallInspector> stall_;  // unless nobody wants to know
  Clock::time_point next_inspection_{};
  uint64_t news_ = 0;  // counts what shows that this rank is not stuck, or that the root is not
  std::optional<uint64_t> news_when_asked_;
  Clock::time_point last_news_{};  // the last submission or decision
  Clock::time_point last_progress_{};
  std::string last_submitted_;
  std::string stuck_text_;  // at the root, that every rank waits and why nothing is decided; empty when that is not so
  Clock::time_point stuck_since_{};
};

}  // namespace horovodish
