// The engine of one rank: takes submissions, negotiates them with the other ranks, runs the decided ones on a plane and
// settles their handles. It knows nothing of Python.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "abi/mpi.h"
#include "engine/completion_threads.h"
#include "engine/process_set.h"
#include "engine/seat.h"
#include "engine/status_door.h"
#include "engine/status_page.h"
#include "engine/waiting_threads.h"
#include "memory/arena.h"
#include "memory/clock.h"
#include "memory/peer_deaths.h"
#include "operation/operation.h"
#include "planes/nccl/launch_order.h"
#include "planes/nccl/launched_operations.h"
#include "timeline/timeline.h"

namespace horovodish {

// Why the engine refuses a call.
class EngineError : public std::runtime_error {
 public:
  EngineError(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  const ErrorKind kind_;
};
class EngineStopped : public EngineError {
 public:
  explicit EngineStopped(const std::string& message) : EngineError(ErrorKind::engine_stopped, message) {}
};

struct EngineConfig {
  WorldRank rank{};
  int size = 1;
  // The memory of each rank of this host, by local rank. Empty if no process set can need shared memory.
  std::vector<std::shared_ptr<std::byte>> arena_memory;
  std::vector<int> peer_sockets;  // -1 for this rank; the engine closes them
  size_t local_rank = 0;
  size_t local_size = 1;
  EngineOptions options;
  bool has_thread = true;  // false: the engine moves only while somebody waits, or takes turns with it

  static constexpr size_t kSlots = 4;
  static_assert(kSlots <= abi::MpiTags::kSlots);
  // How many process sets may exist at once, the global one included. Only used memory costs anything.
  static constexpr size_t kRegions = 256;
  // A request may ask for chunks as large as this, whatever the settings say.
  static constexpr size_t kLargestChunkBytes = 1 << 20;
  static ArenaLayout arena_layout(size_t local_ranks, size_t chunk_bytes) {
    return {local_ranks, std::max(chunk_bytes, kLargestChunkBytes), kSlots, kRegions};
  }
};

class Engine final {
 public:
  explicit Engine(EngineConfig config);
  ~Engine();

  // Begins a process set. All of its ranks must have added it before one of them submits to it. Throws
  // std::invalid_argument if `id` is in use, and EngineStopped. `longest_wait`: the limit of waits in this set; 0: the
  // limit of the other sets.
  void add_process_set(int id, ProcessSetConfig config, StallInspector::Seconds longest_wait = {});
  // Returns whether a caller on this rank has operations under way in a process set.
  bool process_set_busy(int id);
  // Ends a process set. Throws std::invalid_argument if operations are under way in it.
  void remove_process_set(int id);
  // Ends this rank's part in a process set. The operations under way in the set fail, with this reason, on every rank
  // that still needs this one. The set stays until its peers have heard of the end.
  void retire(int process_set, const std::string& reason);
  // Clears the memory of a region. Call it before any rank adds the process set that will use the region.
  void clear_region(size_t region);

  std::shared_ptr<Handle> make_handle() { return std::make_shared<Handle>(++last_handle_id_); }
  // Hands over an operation with its handle, and returns at once. `waits`: the calling thread is about to wait for the
  // operation, so the engine's thread may go on sleeping. Throws EngineError if the name is in use, after the engine
  // has stopped, and in a forked process.
  void enqueue(std::shared_ptr<Operation> operation, bool waits);

  // Hands over an operation. If nothing else is under way, the calling thread then drives the engine for at most
  // `limit`: a small operation ends without a change of threads, and its `then` is called before this returns. Throws
  // as enqueue() does.
  void enqueue_and_drive(const std::shared_ptr<Operation>& operation, std::chrono::nanoseconds limit);

  // Tells the other ranks, which may wait for an operation, that this rank cannot take part in it. The operation and
  // its family then fail on all ranks.
  void refuse(Kind kind, const std::string& name, int process_set, const std::string& why, Family family = {});

  // Drives the engine until the handle is settled or the time is over. Returns true if the handle is settled. Throws
  // EngineError in a forked process, as the next functions do.
  bool wait(const Handle& handle, std::chrono::nanoseconds limit);
  // Like wait(), for a thread that does other work after the limit. That thread does not count as waiting.
  bool drive(const Handle& handle, std::chrono::nanoseconds limit);

  // Takes back a send or a receive that has not begun to move. Returns true if it did; the operation then fails.
  bool cancel(const Handle& handle);

  // The number of the last operation that this rank has launched on a GPU.
  uint64_t launched() const { return launched_operations_.last(); }
  // The number of the first launched operation that never completed; 0 if there is none. Also known after stop().
  uint64_t first_lost() const { return launched_operations_.first_lost(); }
  // Drives the engine until the GPU has completed every operation up to this number, or the time is over. Returns true
  // if the GPU has. Throws EngineError also if any operation of this rank never completed.
  bool settle_launched(uint64_t number, std::chrono::nanoseconds limit);

  // How long each rank of a process set made the others wait, by rank. Only the set's first rank knows.
  std::map<WorldRank, Lateness> lateness(int process_set);
  // A report for each tensor of a process set that this rank has encoded.
  std::vector<Residuals::Report> code_reports(int process_set);
  // How many operations of this rank were not in the response cache of a process set.
  uint64_t full_requests(int process_set);

  // Records from the next submission until stop_timeline() or stop(). Throws std::invalid_argument if a recording is
  // under way.
  void start_timeline(const std::shared_ptr<Timeline>& timeline);
  // Throws std::invalid_argument if there is no recording.
  void stop_timeline();
  // The script has waited for the engine since `begin`, in nanoseconds of the steady clock. wait() records it itself.
  void waited(int64_t begin);
  // Adds a mark of the script to the current recording.
  void mark(const std::string& name);

  // Leaves the job. Everything pending on this rank fails, and peers that need this rank later hear the reason. The
  // operations that peers are executing go on, unless this rank still has work to do for them. `failed`: the rank
  // leaves because of an error. The destructor calls it if nobody else has.
  void stop(bool failed, const std::string& reason) noexcept;
  // How many operations of all ranks have succeeded here and may have shared gradients or parameters: barriers and
  // operations on single numbers do not count.
  uint64_t completed() const { return completed_; }
  // Begins a step of this rank, which is about to reduce gradients for the first time since an optimizer's last step.
  // The step lasts until the next one begins. A compiled program calls it each time that it runs.
  void begin_step();
  // How many steps have begun. Reports and errors name the last one.
  uint64_t steps() const noexcept { return steps_; }
  // Call it after a join: this rank ran out of data early, and its next step gets the number of that step on the other
  // ranks.
  void go_on_from_step(uint64_t steps) noexcept;
  // How many bytes of this rank were reduced, in all process sets. Single numbers, such as a loss for the log, do not count.
  uint64_t reduced_bytes() const { return reduced_bytes_; }
  // Lets `horovodish status` see what this rank does. `page`: memory that begins with a StatusPage. Other arguments: see
  // StatusDoor.
  void show_status(std::shared_ptr<std::byte> page, int listener, int stacks, int stack_signal, HoldPython hold_python);
  // For code that waits outside of the engine: sets its line in the answer to `horovodish status`. An empty line
  // removes it. `who`: the code.
  void describe_wait(const std::string& who, const std::string& line);
  // The engine's message about the lost rank. Empty if no rank has failed and no operation here needed a rank that has
  // left. Frameworks wrap errors, but every such error contains this text. If only operations that were launched on a
  // GPU have failed, the message about them.
  std::string loss();
  // The errors of the operations that failed last, the newest at the end, each with whether a framework's program ran
  // the operation.
  std::deque<std::pair<Error, bool>> failures();
  // Whether an operation of this rank has failed because a rank was lost or did not answer, or because the engine was stopped.
  bool has_failed() const { return loss_raised_ || refused_ || launched_operations_.any_lost(); }
  // The calling thread, without Python's lock, is about to end the process. Other threads then wait for the end instead
  // of returning to Python: Python ends a thread by force if that thread wants the lock back.
  void hold_other_threads();
  // Call this before returning to Python. At process exit it never returns. Threads that a framework waits for at process exit,
  // as JAX does, must not call it.
  void stop_here_if_exiting() const;
  // Like stop_here_if_exiting(), for a thread that takes the GIL between these two calls. The end of the process waits
  // for that thread.
  void enter_python() const;
  void entered_python() const { --entering_python_; }

  WorldRank rank() const { return config_.rank; }
  int size() const { return config_.size; }
  bool horovods_gradients() const { return config_.options.horovods_gradients; }
  RankInGroup local_place() const {
    return {static_cast<int>(config_.local_rank), static_cast<int>(config_.local_size)};
  }
  // This rank within a process set. Never waits.
  RankInGroup place(int process_set);

 private:
  class Driver;
  // A process set as its callers see it.
  struct Use {
    RankInGroup place;
    size_t under_way = 0;  // operations whose caller has a handle; a refusal has none
    std::unordered_set<std::string> names;  // the names in use, without those of family members
  };

  // What the threads of this process were doing when a process set last asked.
  struct Look {
    Clock::time_point time{};
    uint64_t news = 0;
    bool sleeps = false;  // apart from the threads that wait in that process set
  };

  bool is_forked() const;
  void check_process() const;
  void check_open(const std::string& what);
  void start_thread();
  void run();
  bool turn() noexcept;
  bool take_submissions() noexcept;
  std::string status();
  void write_status() noexcept;
  void stated(const Operation& operation, Clock::time_point now) noexcept;
  bool nothing_submitted();
  bool farewells_sent();
  void warn_of_lost_operations() const noexcept;
  bool awaits_news() const;
  std::chrono::nanoseconds spin() const;
  ProcessSet& process_set(int id);
  void wait_for_gpu(uint64_t number, Clock::time_point deadline) noexcept;
  void drive_until(const Handle& handle, Clock::time_point deadline) noexcept;
  void leave_seat() noexcept;
  std::optional<std::chrono::nanoseconds> nap() const;

  friend class EngineByTurns;  // used by tests
  // ProcessSet calls the following.
  friend ProcessSet;
  // Every operation ends once, with an error or none.
  void settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept;
  void count(const Operation& operation) noexcept;
  // Returns whether no thread of this rank submits anything before the next decision of a process set. The answer
  // counts only if two calls in a row agree.
  bool submits_nothing(int process_set) noexcept;
  // No more decisions follow in this process set, for this reason.
  void decisions_ended(int process_set, Loss loss, const std::string& why);

  Error described(const Operation& operation, const Error& error) const noexcept;
  std::shared_ptr<Timeline> take_timeline();
  void record(const std::string& name, bool begins_step);

  EngineConfig config_;
  const uint64_t forks_;  // the number of forks when the engine was made
  std::atomic<uint64_t> last_handle_id_{0};
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint64_t> reduced_bytes_{0};
  std::atomic<uint64_t> steps_{0};
  std::atomic<uint64_t> completed_while_joined_{0};

  std::mutex inbox_mutex_;
  std::vector<std::shared_ptr<Operation>> inbox_;  // guarded by inbox_mutex_
  std::map<int, Use> uses_;  // by process set; guarded by inbox_mutex_
  bool closed_ = false;  // guarded by inbox_mutex_
  std::string loss_;  // the loss that made an operation fail here; guarded by inbox_mutex_
  std::string death_;  // the loss of the first rank that failed; guarded by inbox_mutex_
  std::deque<std::pair<Error, bool>> failures_;  // no more than kFailures; guarded by inbox_mutex_
  std::atomic<bool> loss_raised_{false};  // a call has raised that a rank is lost, or did not answer
  std::shared_ptr<Timeline> timeline_;  // null: none is recorded; guarded by inbox_mutex_
  std::atomic<bool> records_waits_{false};  // a timeline is recorded
  std::atomic<bool> has_submissions_{false};
  std::atomic<bool> status_wanted_{false};
  std::mutex status_mutex_;
  std::string status_;  // guarded by status_mutex_, as the next one
  std::map<std::string, std::string> described_waits_;
  std::shared_ptr<StatusPage> page_ = std::make_shared<StatusPage>();  // after show_status(), the supervisor's
  std::unique_ptr<StatusDoor> status_door_;  // null after stop()

  Seat seat_;
  WaitingThreads waiting_threads_;
  std::shared_ptr<Arena> arena_;  // null when no process set can need it, and after stop()
  const std::shared_ptr<Doorbell> own_doorbell_ = std::make_shared<Doorbell>();  // used when there is no arena
  // Owns the arena if the doorbell lies there. stop() replaces it while it holds the seat and inbox_mutex_, so either
  // lock is enough to read it. A thread that rings or sleeps without both locks has a copy, so the arena outlives the
  // last such thread.
  std::shared_ptr<Doorbell> doorbell_ = own_doorbell_;
  std::unique_ptr<PeerDeaths> peer_deaths_;
  std::unique_ptr<CompletionThreads> completion_threads_ = std::make_unique<CompletionThreads>();  // null after stop()
  const Operation* driven_ = nullptr;  // by enqueue_and_drive(); used only by the thread that holds the seat
  LaunchOrder launch_order_{[this](int set, uint64_t decision) {
    process_set(0).send_note({.topic = Note::Topic::ask_launch, .process_set = set, .decision = decision});
  }};  // used only by the thread that holds the seat, as the next one
  LaunchedOperations launched_operations_;
  SentBytes sent_;  // likewise
  std::map<int, std::unique_ptr<ProcessSet>> process_sets_;

  Clock::time_point
      sleeps_until_{};  // the engine's thread, unless it is woken; used only by the thread that holds the seat
  uint64_t news_ = 0;  // counts submissions and ends of operations; used only by the thread that holds the seat
  std::map<int, Look> looks_;  // by process set; likewise
  std::atomic<bool> stopping_{false}, refused_{false};
  std::atomic<std::thread::id> ends_process_{};  // a thread that called hold_other_threads()
  mutable std::atomic<int> entering_python_{0};  // threads between enter_python() and entered_python()
  std::thread thread_;
};

// The calling thread serves the library: the timeline does not show how long it waits.
void record_no_waits() noexcept;

}  // namespace horovodish
