// The times of each operation's phases on this rank, as a trace that a separate thread writes.
//
// The driving thread pushes small records into a ring: a time, a number and an event. It never formats, writes or
// waits. The writer uses only spare processor time. If it does not keep up, records are dropped and counted. Without a
// recording, an operation costs a look at a null pointer in each place.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "memory/single_producer_ring.h"
#include "negotiation/request.h"

namespace horovodish {

// The phases of a plane's work on an operation. Two phases come before: "negotiate", from the submission to the
// decision, and "queue", from the decision to the first of these. "wait" belongs to a thread of the script that waits
// for the end of operations.
enum class Phase : uint8_t { pack, reduce, exchange, unpack, connect, nccl, encode, decode, wait };

// Track numbers: for events of no operation, for steps and marks of the script, and for the waits of the script.
constexpr uint32_t kEngineTrack = 1, kStepsTrack = 2, kWaitsTrack = 3;

// The name of a track and the request of the operations on it.
struct TrackDescription {
  std::string name;
  std::shared_ptr<const Request> request;
};

// Small, because the main cost of recording is to get the record's cache line back from the writing thread.
struct TimelineRecord {
  enum class What : uint8_t { described, submitted, decided, phase, settled, failed, cycle };

  TimelineRecord() : TimelineRecord(What::described, 0) {}
  explicit TimelineRecord(What what, uint32_t track, int64_t at = 0) : at(at), what(what), track(track) {}
  TimelineRecord(Phase phase, uint32_t track, int64_t begin, int64_t end)
      : at(end), length(static_cast<float>(end - begin)), what(What::phase), phase(phase), track(track) {}

  int64_t at;  // nanoseconds of the steady clock; of a phase: its end
  float length = 0;  // of a phase: nanoseconds; of a submission: 1 if a framework's program made it
  What what : 4;
  Phase phase : 4 = Phase::pack;
  uint32_t track : 24;
};
static_assert(sizeof(TimelineRecord) == 16);

// A step of a wrapped optimizer begins, or the script marks a moment.
struct Moment {
  std::string name;
  int64_t at;
  bool begins_step;
};

class Recording;

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  // The common properties of operations with one name. At most one of them is under way.
  struct Track {
    std::string name;
    uint32_t number = 0;
    bool busy = false;
    std::shared_ptr<const std::string> signature;  // of the operation that was last described to the writer
  };

  // Writes through `recording`.
  Timeline(std::unique_ptr<Recording> recording, bool mark_cycles);
  ~Timeline();

  static int64_t now() { return nanoseconds(Clock::now()); }
  static int64_t nanoseconds(Clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }

  // Called by whoever drives the engine, one thread at a time.
  Track* submitted(const std::shared_ptr<const Request>& request, const std::shared_ptr<const std::string>& signature,
                   int process_set, int64_t at, bool in_program);
  void decided(const Track& track, int64_t at);
  int64_t begin(bool follows) const { return follows && last_phase_ != 0 ? last_phase_ : now(); }
  void phase(const Track& track, Phase phase, int64_t begin);
  void settled(Track& track, bool failed);

  // Called by any thread, seldom.
  void add(Moment&& moment);
  // Adds the text of a failed operation. Without memory, the text is dropped.
  void add_error(const std::string& text) noexcept;
  // A thread of the script has waited since `begin`.
  void waited(int64_t begin);

  // Ends the trace and writes it to the end. Later records are ignored.
  void finish();

 private:
  Track& track_of(int process_set, std::string_view name);
  Track& named(int process_set, std::string_view name);
  bool describe(const Track& track, const std::shared_ptr<const Request>& request);
  void push(TimelineRecord&& record);
  template <class T>
  void keep(std::vector<T>& list, size_t most, T&& value);
  void run();
  void write_records();
  template <class Step>
  void write(Step step) noexcept;

  const bool mark_cycles_;
  SingleProducerRing<TimelineRecord> records_;
  SingleProducerRing<TrackDescription> descriptions_;  // one for each record of type `described`
  std::unordered_map<int, std::map<std::string, Track, std::less<>>> tracks_;  // by process set and name
  uint32_t last_track_ = kWaitsTrack;
  int64_t last_phase_ = 0, last_decision_ = 0;  // the end of the last phase, and the time of the last decision
  std::atomic<uint64_t> dropped_{0};

  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> finishing_{false};  // set with mutex_ held
  std::vector<Moment> moments_;  // not written yet; guarded by mutex_, as the next one
  std::vector<TimelineRecord> waits_;
  std::unique_ptr<Recording> recording_;  // the writer's alone until it has ended
  bool failed_ = false;  // likewise
  std::thread writer_;
};

// The data for recording that an operation carries.
struct Trace {
  std::shared_ptr<Timeline> timeline;  // null: it is not recorded
  int64_t submitted_at = 0;  // 0: when the engine takes it from the inbox
  Timeline::Track* track = nullptr;  // null until submitted()

  void submitted(const std::shared_ptr<const Request>& request, const std::shared_ptr<const std::string>& signature,
                 int process_set, bool in_program, Timeline::Clock::time_point taken_up) {
    if (!timeline) return;
    const int64_t at = submitted_at != 0 ? submitted_at : Timeline::nanoseconds(taken_up);
    track = timeline->submitted(request, signature, process_set, at, in_program);
  }
  void decided(Timeline::Clock::time_point at) const {
    if (track != nullptr) timeline->decided(*track, Timeline::nanoseconds(at));
  }
  void settled(bool failed) const {
    if (track != nullptr) timeline->settled(*track, failed);
  }

  void mark(const std::string& text) const noexcept {
    if (track != nullptr) timeline->add_error(text);
  }

  // A phase of an operation, for the length of a scope.
  class Span {
   public:
    // `follows`: the last recorded phase has just ended, which saves a look at the clock.
    Span(const Trace& trace, Phase phase, bool follows = false)
        : timeline_(trace.timeline.get()),
          track_(trace.track),
          phase_(phase),
          begin_(track_ == nullptr ? 0 : timeline_->begin(follows)) {}
    ~Span() {
      if (track_ != nullptr) timeline_->phase(*track_, phase_, begin_);
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    // Call it if nothing was done.
    void cancel() { track_ = nullptr; }

   private:
    Timeline* const timeline_;
    const Timeline::Track* track_;
    const Phase phase_;
    const int64_t begin_;
  };
};

}  // namespace horovodish
