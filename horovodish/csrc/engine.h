// The engine of one rank: takes submissions, negotiates them with the other ranks, runs the decided ones on a plane and
// settles their handles. It knows nothing of Python.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "abi/mpi.h"
#include "arena.h"
#include "links/link.h"
#include "negotiation.h"
#include "operation.h"
#include "peer_watch.h"
#include "planes/plane.h"
#include "seat.h"

namespace horovodish {

class DuplicateName : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};
class EngineStopped : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class ForkedProcess : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct EngineConfig {
  int rank = 0;
  int size = 1;
  std::vector<std::vector<int>> hosts;  // ranks by host, each list ascending, the hosts by their first rank
  // Of the ranks of this host, in the order of its list; empty when this rank is alone on it.
  std::vector<int> arena_descriptors;
  std::vector<int> peer_sockets;  // -1 for this rank; the engine closes them
  std::optional<abi::Mpi> mpi;    // when there are several hosts
  int generation = 0;             // how often an engine was started on the MPI communicator before, equal on all ranks
  size_t chunk_bytes = 0;         // of the shared-memory plane
  size_t ring_segment_bytes = 0;  // of the MPI ring
  size_t cache_capacity = 0;      // entries of the response cache
  std::chrono::microseconds spin{0};  // how long a waiting caller spins before it sleeps

  static constexpr size_t kSlots = 4;
  static ArenaLayout arena_layout(size_t local_ranks, size_t chunk_bytes) { return {local_ranks, chunk_bytes, kSlots}; }
};

class Engine {
 public:
  explicit Engine(EngineConfig config);
  ~Engine();

  std::shared_ptr<Handle> make_handle() { return std::make_shared<Handle>(++last_handle_id_); }

  // Hands over an operation with its handle; returns at once. `waits`: the calling thread is about to wait for it, so the
  // engine's thread can go on sleeping. Throws DuplicateName, EngineStopped, ForkedProcess.
  void enqueue(std::shared_ptr<Operation> operation, bool waits);

  // Drives the engine until the handle is settled or the time is over; true when it is settled. Throws ForkedProcess.
  bool wait(const Handle& handle, std::chrono::nanoseconds limit);

  // Handles settled since the last call.
  std::vector<uint64_t> take_settled();

  // Leaves the job: whatever is pending fails, peers are told the reason. May be called once; the destructor does it
  // otherwise. `failed`: this rank leaves because of an error.
  void stop(bool failed, const std::string& reason);

  int rank() const { return config_.rank; }
  int size() const { return config_.size; }

 private:
  using Clock = std::chrono::steady_clock;

  // A neighbour in the negotiation tree.
  struct Edge {
    int rank;
    std::unique_ptr<Link> link;
    std::optional<size_t> local;  // local rank, when on this host
    bool lost = false;
  };

  void connect();
  void check_process() const;
  RankSet subtree(size_t host) const;
  std::unique_ptr<Link> make_mpi_link(int peer) const;
  void run();
  bool turn();
  bool take_submissions();
  bool read(Edge& edge, std::optional<size_t> child);
  void send_messages();
  void apply_decisions();
  void execute(const Decision& decision);
  void abandon(const Error& error);
  bool busy() const { return !undecided_.empty() || !executing_.empty(); }
  void drive_until(const Handle& handle, Clock::time_point deadline);
  void leave_seat();
  std::optional<std::chrono::nanoseconds> nap();
  void settle(const std::shared_ptr<Operation>& operation, std::optional<Error> error);
  void report_stuck();

  EngineConfig config_;
  const pid_t process_ = getpid();
  std::atomic<uint64_t> last_handle_id_{0};

  std::mutex inbox_mutex_;
  std::vector<std::shared_ptr<Operation>> inbox_;     // guarded by inbox_mutex_
  std::unordered_set<std::string> names_in_flight_;   // guarded by inbox_mutex_
  std::vector<uint64_t> settled_;                     // guarded by inbox_mutex_
  bool closed_ = false;                               // guarded by inbox_mutex_
  std::atomic<bool> has_submissions_{false};

  // From here on: used only by the thread that holds the seat.
  Seat seat_;
  std::unique_ptr<Arena> arena_;       // null when this rank is alone on its host
  Doorbell own_doorbell_;              // used when there is no arena
  Doorbell* doorbell_ = &own_doorbell_;
  std::unique_ptr<Negotiation> negotiation_;
  std::optional<Edge> parent_;                     // none at the root
  std::vector<Edge> children_;                     // child i is participant i + 1 of the negotiation
  std::unique_ptr<Plane> plane_;
  std::unordered_map<std::string, std::shared_ptr<Operation>> undecided_;
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> executing_;  // by handle id
  Clock::time_point stuck_since_{};
  std::string stuck_text_;
  int fruitless_turns_ = 0;  // while polling

  std::atomic<bool> stopping_{false};
  std::unique_ptr<PeerWatch> peer_watch_;
  std::thread thread_;
};

}  // namespace horovodish
