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

#include "abi/mpi.h"
#include "arena.h"
#include "families.h"
#include "launch_order.h"
#include "links/link.h"
#include "negotiation.h"
#include "operation.h"
#include "peer_watch.h"
#include "planes/plane.h"
#include "stall.h"
#include "tree.h"

namespace horovodish {

struct ProcessSetConfig {
  int id = 0;                           // 0: the global set
  std::vector<int> ranks;               // of the world, in the order of their ranks within the set
  int own = 0;                          // this rank's index in `ranks`
  std::vector<std::vector<int>> hosts;  // indices by host, each list ascending, the hosts by their first index
  // Where there are several ranks on this host:
  std::vector<size_t> local;  // their local ranks in the arena, in the order of this host's list
  size_t region = 0;          // of the arena, equal on all of them
  // Where there are several hosts:
  std::optional<abi::Mpi> mpi;  // with a communicator of exactly these ranks
  int generation = 0;           // how often an engine used that communicator before, equal on all ranks
};

struct EngineOptions {
  size_t chunk_bytes = 0;             // of the shared-memory plane, where a request does not say otherwise
  size_t ring_segment_bytes = 0;      // of a message between hosts, in the same way
  size_t cache_capacity = 0;          // entries of the response cache
  std::chrono::microseconds spin{0};  // how long a waiting caller spins before it sleeps
  StallInspector::Options stall;
  bool nccl_alone = false;  // a rank that is alone uses NCCL for CUDA tensors, too
  bool shared_gpu = false;  // several ranks may use one GPU
  int stack_signal = 0;  // makes this process print its Python stacks, when a rank lags; 0: none
};

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
  void flush() { negotiation_->flush(); }
  bool busy() const { return !undecided_.empty() || !held_.empty() || !executing_.empty() || join_; }
  // Whether something is under way that moves only while this rank looks.
  bool polls() const { return busy() && plane_ && plane_->needs_polling(); }
  // How long the driver may sleep when nobody rings; nothing means for ever.
  std::optional<std::chrono::nanoseconds> nap() const;

  // Of the global set: asks for a turn for a decision of another one.
  void ask_turn(int process_set, uint64_t decision);

  // Ends everything that this rank has under way and says farewell to the peers; advance_farewell() until it is true.
  void leave(bool failed, const std::string& reason, const Error& error);
  bool advance_farewell();

  const std::map<int, Lateness>& lateness() const { return negotiation_->lateness(); }
  uint64_t full_requests() const { return negotiation_->full_requests(); }
  int world_rank() const { return config_.ranks[static_cast<size_t>(config_.own)]; }
  size_t region() const { return config_.region; }

 private:
  // A neighbour in the negotiation tree.
  struct Edge {
    int rank;  // of the world
    std::unique_ptr<Link> link;
    std::optional<size_t> local;  // local rank in the arena, when on this host
    bool lost = false;
  };

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

  void connect(Arena* arena);
  RankSet ranks_from(int index) const;
  bool read(Edge& edge, std::optional<size_t> child);
  bool advance_plane();
  void send_messages();
  void apply_decisions();
  void fail(const std::string& name, const Error& error);
  void fail_family(const std::string& family, const Decision& decision);
  bool goes_on(const std::shared_ptr<Operation>& operation);
  void submit_held(const std::string& family);
  bool name_in_use(const Request& request) const;
  void refuse_name(const std::shared_ptr<Operation>& operation);
  void settle(const std::shared_ptr<Operation>& operation, const Error* error);
  void submit_next(const std::string& name);
  void execute(const Decision& decision);
  void take_turn(uint64_t decision);
  std::shared_ptr<Operation> neutral(const std::string& signature) const;
  void abandon_undecided(const Error& error);
  void abandon_executing(const Error& error);
  void apply_lost(const Decision& lost);
  void end_plane();
  uint64_t finished() const;
  void complete(const std::shared_ptr<Operation>& operation);
  void refuse(const std::shared_ptr<Operation>& operation, const Error& error);
  std::unique_ptr<Plane> make_host_plane(Arena* arena, size_t host, size_t own_local);
  void fail_everywhere(const Lost& lost);
  std::optional<uint64_t> waiting() const;
  void inspect();
  void inspect_as_root(StallInspector::Action action, Clock::time_point now);
  void inspect_as_other(StallInspector::Action action, Clock::time_point now);
  std::string describe_waiting() const;
  std::string status() const;
  void report_stuck();

  const ProcessSetConfig config_;
  const EngineOptions options_;
  const PeerWatch* const watch_;
  LaunchOrder& order_;
  const Settle settle_;
  const Turn ask_turn_, give_turn_;
  std::unique_ptr<Negotiation> negotiation_;
  std::optional<Edge> parent_;  // none at the root
  std::vector<Edge> children_;  // child i is participant i + 1 of the negotiation
  std::unique_ptr<Plane> plane_;
  std::unordered_map<std::string, std::shared_ptr<Operation>> undecided_;
  // By name, what waits for an undecided operation of that name: after a refusal the caller may use the name again before
  // all ranks know of it, and a rank may refuse a second operation while the first one is under way.
  std::unordered_map<std::string, std::deque<std::shared_ptr<Operation>>> behind_;
  std::map<uint64_t, std::shared_ptr<Operation>> executing_;  // by the number of its decision
  // Of operations under way that belong to a family; where its run has failed, a name is free before its operation ends.
  std::unordered_map<std::string, const Operation*> family_names_;
  Families families_;
  // By family, the run that this rank has refused, until all ranks know, and what a later run submits meanwhile.
  std::unordered_map<std::string, int64_t> refused_;
  std::unordered_map<std::string, std::deque<std::shared_ptr<Operation>>> held_;
  std::shared_ptr<Operation> join_;  // null when this rank has not joined
  std::optional<Last> last_;  // once a rank is lost
  std::optional<Broken> broken_;
  std::optional<StallInspector> stall_;  // unless nobody wants to know
  uint64_t news_ = 0;  // counts what shows that this rank is not stuck, or that the root is not
  Clock::time_point last_news_{};  // the last submission or decision
  Clock::time_point next_inspection_{};
  std::string last_submitted_;
  Clock::time_point stuck_since_{};
  std::string stuck_text_;
  Clock::time_point last_progress_{};
};

}  // namespace horovodish
