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
#include <unordered_map>
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
#include "memory/sleeping_process.h"
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
  // Of the ranks of this host by local rank; empty when no process set can need shared memory.
  std::vector<std::shared_ptr<std::byte>> arena_memory;
  std::vector<int> peer_sockets;  // -1 for this rank; the engine closes them
  size_t local_rank = 0;
  size_t local_size = 1;
  EngineOptions options;
  bool has_thread = true;  // else the engine moves only while somebody waits, or takes turns with it

  static constexpr size_t kSlots = 4;
  static_assert(kSlots <= abi::MpiTags::kSlots);
  // Process sets that may be alive at once, the global one included. Only memory that is used costs anything.
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

  // A process set begins. All of its ranks must have added it before one submits to it. Throws std::invalid_argument
  // when `id` is in use, and EngineStopped. `longest_wait`: its ranks wait for each other no longer, 0: as for other sets.
  void add_process_set(int id, ProcessSetConfig config, StallInspector::Seconds longest_wait = {});
  // Does a caller on this rank have operations under way in a process set?
  bool process_set_busy(int id);
  // The end of a process set; throws std::invalid_argument when operations are under way in it.
  void remove_process_set(int id);
  // This rank takes no further part in a process set. What is under way in it fails on every rank that still needs this one, with
  // this reason. The set stays, for its peers to hear of it.
  void retire(int process_set, const std::string& reason);
  // Makes the memory of a region as new, before any rank adds the process set that will use it.
  void clear_region(size_t region);

  std::shared_ptr<Handle> make_handle() { return std::make_shared<Handle>(++last_handle_id_); }
  // Hands over an operation with its handle; returns at once. `waits`: the calling thread is about to wait for it, so
  // the engine's thread can go on sleeping. Throws EngineError: a name in use, an engine that has stopped, a forked process.
  void enqueue(std::shared_ptr<Operation> operation, bool waits);

  // Hands over an operation. When nothing else is under way, the calling thread then drives the engine for `limit` at most:
  // what is small ends without a change of threads, and what follows the operation is called before this returns.
  // Throws as enqueue() does.
  void enqueue_and_drive(const std::shared_ptr<Operation>& operation, std::chrono::nanoseconds limit);

  // Says that this rank cannot take part in an operation that the others may wait for; it then fails on all of them, and
  // its family with it.
  void refuse(Kind kind, const std::string& name, int process_set, const std::string& why, Family family = {});

  // Drives the engine until the handle is settled or the time is over; true when it is settled. Throws EngineError in a
  // forked process, as the next ones.
  bool wait(const Handle& handle, std::chrono::nanoseconds limit);
  // Like wait(), for a thread that does other work when the limit is over. It does not count as one that waits.
  bool drive(const Handle& handle, std::chrono::nanoseconds limit);

  // Takes a send or a receive back that has not begun to move, so that it fails; true if it has.
  bool cancel(const Handle& handle);

  // The number of the operation that this rank has launched on a GPU last.
  uint64_t launched() const { return launched_operations_.last(); }
  // The number of the first one that never came to its end; 0 if there is none. Also known after stop().
  uint64_t first_lost() const { return launched_operations_.first_lost(); }
  // Drives the engine until every operation up to this number has come to its end on the GPU, or the time is over; true when they
  // have. Throws EngineError also if any operation of this rank never came to its end.
  bool settle_launched(uint64_t number, std::chrono::nanoseconds limit);

  // What the ranks of a process set made the others wait, by rank; known to its first rank alone.
  std::map<WorldRank, Lateness> lateness(int process_set);
  // A report for each tensor of a process set that this rank has encoded.
  std::vector<Residuals::Report> code_reports(int process_set);
  // How many operations of this rank the response cache of a process set did not know.
  uint64_t full_requests(int process_set);

  // Records, from the next submission on, until stop_timeline() or stop(). Throws std::invalid_argument when a recording
  // is under way.
  void start_timeline(const std::shared_ptr<Timeline>& timeline);
  // Throws std::invalid_argument when there is nothing to stop.
  void stop_timeline();
  // The script has waited for the engine since `begin`, in nanoseconds of the steady clock. wait() records it itself.
  void waited(int64_t begin);
  // A mark of the script, in what is recorded now.
  void mark(const std::string& name);

  // Leaves the job: whatever is pending on this rank fails, and peers that need it from now on are told the reason. What they
  // are executing goes on, unless this rank had a part in it that is not done. `failed`: it leaves because of an error. The
  // destructor does it otherwise.
  void stop(bool failed, const std::string& reason) noexcept;
  // How many operations of all ranks have succeeded here. Of ranks that were cut off, the one with most is furthest.
  uint64_t completed() const { return completed_; }
  // A step of this rank begins: it is about to reduce gradients for the first time since an optimizer's last step. The step lasts
  // until the next one begins. A compiled program calls it whenever it runs.
  void begin_step();
  // How many steps have begun. Reports and errors name the last one.
  uint64_t steps() const noexcept { return steps_; }
  // After a join: this rank ran out of data early, and its next step has the number that it has on the other ranks.
  void go_on_from_step(uint64_t steps) noexcept;
  // How many bytes of this rank were reduced, in all process sets. Single numbers, such as a loss for the log, do not count.
  uint64_t reduced_bytes() const { return reduced_bytes_; }
  // From now on `horovodish status` learns what this rank does. `page`: memory in which a StatusPage begins. The rest: see StatusDoor.
  void show_status(std::shared_ptr<std::byte> page, int listener, int stacks, int stack_signal, HoldPython hold_python);
  // A line of the answer to `horovodish status` from code that waits outside of the engine, in place of its last one; none if it is
  // empty. `who`: which code.
  void describe_wait(const std::string& who, const std::string& line);
  // The engine's message about the lost rank, empty if none has failed and no operation here has needed one that has left.
  // Frameworks wrap errors, but every such error contains this text. If nothing failed but what had been launched on a GPU, the
  // message about that.
  std::string loss();
  // The errors of the operations that failed last, the newest one at the end; and whether a framework's program ran each.
  std::deque<std::pair<Error, bool>> failures();
  // Whether an operation of this rank has failed because a rank was lost or did not answer, or because the engine was stopped.
  bool has_failed() const { return loss_raised_ || refused_ || launched_operations_.any_lost(); }
  // The calling thread, without Python's lock, is about to end the process. Other threads that come back from here could
  // not run any more: Python ends a thread that wants its lock back by force. They wait for the end instead.
  void hold_other_threads();
  // Call this before returning to Python. At process exit it never returns. Threads that a framework waits for at process exit,
  // as JAX does, must not call it.
  void stop_here_if_exiting() const;
  // The same for a thread that takes the GIL between these two calls, which the end of the process waits for.
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
    std::unordered_set<std::string> names;  // of those that belong to no family
  };

  // What the threads of this process were doing when a process set asked last.
  struct Look {
    Clock::time_point time{};
    uint64_t news = 0;
    bool sleeps = false;  // but for the threads that wait in that process set
  };

  bool is_left_behind() const;
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
  void say_what_was_lost() const noexcept;
  bool awaits_news() const;
  std::chrono::nanoseconds spin() const;
  ProcessSet& process_set(int id);
  void wait_for_gpu(uint64_t number, Clock::time_point deadline) noexcept;
  void drive_until(const Handle& handle, Clock::time_point deadline) noexcept;
  void leave_seat() noexcept;
  std::optional<std::chrono::nanoseconds> nap() const;

  friend class EngineByTurns;  // of tests
  // What the process sets tell it.
  friend ProcessSet;
  // Every operation ends once, with an error or none.
  void settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept;
  void count(const Operation& operation) noexcept;
  // Whether no thread of this rank submits anything before the next decision of a process set. Two calls in a row must find the
  // same.
  bool submits_nothing(int process_set) noexcept;
  // Nothing is decided any more, for this reason.
  void decisions_ended(int process_set, Loss loss, const std::string& why);

  Error described(const Operation& operation, const Error& error) const noexcept;
  std::shared_ptr<Timeline> take_timeline();
  void record(const std::string& name, bool begins_step);

  EngineConfig config_;
  const uint64_t forks_;  // when it was made
  std::atomic<uint64_t> last_handle_id_{0};
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint64_t> reduced_bytes_{0};
  std::atomic<uint64_t> steps_{0};
  std::atomic<uint64_t> completed_while_joined_{0};

  std::mutex inbox_mutex_;
  std::vector<std::shared_ptr<Operation>> inbox_;  // guarded by inbox_mutex_
  std::map<int, Use> uses_;  // by process set; guarded by inbox_mutex_
  bool closed_ = false;  // guarded by inbox_mutex_
  std::string loss_;  // of which an operation here has failed; guarded by inbox_mutex_
  std::string death_;  // that of the first rank which has failed; guarded by inbox_mutex_
  std::deque<std::pair<Error, bool>> failures_;  // no more than kFailures; guarded by inbox_mutex_
  std::atomic<bool> loss_raised_{false};  // some call has raised that a rank is lost, or did not answer
  std::shared_ptr<Timeline> timeline_;  // null: none is recorded; guarded by inbox_mutex_
  std::atomic<bool> records_waits_{false};  // a timeline is recorded
  std::atomic<bool> has_submissions_{false};
  std::atomic<bool> status_wanted_{false};
  std::mutex status_mutex_;
  std::string status_;  // guarded by status_mutex_, as the next one
  std::map<std::string, std::string> described_waits_;
  StatusPage own_page_;  // used where nobody else looks
  std::shared_ptr<StatusPage> page_{std::shared_ptr<void>(), &own_page_};
  std::unique_ptr<StatusDoor> status_door_;  // null after stop()

  Seat seat_;
  WaitingThreads waiting_threads_;
  std::shared_ptr<Arena> arena_;  // null when no process set can need it, and after stop()
  Doorbell own_doorbell_;  // used when there is no arena
  // Owns the arena if it lies there. stop() replaces it with the seat and inbox_mutex_ held, so either is enough to read it. A
  // thread that rings or sleeps without both has a copy, so the arena outlives the last such thread.
  std::shared_ptr<Doorbell> doorbell_{std::shared_ptr<void>(), &own_doorbell_};
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
