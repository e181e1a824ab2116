#include "timeline/timeline.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <new>

#include "memory/sleeping_process.h"
#include "timeline/recording.h"

namespace horovodish {

namespace {

// How many records and descriptions fit while the writer does not get to run.
constexpr size_t kRecords = 1 << 15, kDescriptions = 1 << 12;
// How often the writer looks. A killed process loses what came after its last look.
constexpr std::chrono::milliseconds kInterval{20};
using What = TimelineRecord::What;

constexpr uint32_t kMostTracks = 4096;
constexpr std::string_view kOtherNames = "other names";

}  // namespace

Timeline::Timeline(std::unique_ptr<Recording> recording, bool mark_cycles)
    : mark_cycles_(mark_cycles), records_(kRecords), descriptions_(kDescriptions), recording_(std::move(recording)) {
  writer_ = std::thread([this] { run(); });
}

Timeline::~Timeline() { finish(); }

Timeline::Track* Timeline::submitted(const std::shared_ptr<const Request>& request,
                                     const std::shared_ptr<const std::string>& signature, int process_set, int64_t at,
                                     bool in_program) {
  Track& track = track_of(process_set, request->name);
  const bool known = track.signature == signature || (track.signature && *track.signature == *signature);
  if (!known && describe(track, request)) track.signature = signature;
  TimelineRecord record(What::submitted, track.number, at);
  record.length = in_program ? 1 : 0;
  push(std::move(record));
  track.busy = true;
  return &track;
}

// Operations that are decided in one round of the engine have the same time of decision.
void Timeline::decided(const Track& track, int64_t at) {
  if (mark_cycles_ && at != last_decision_) {
    push(TimelineRecord(What::cycle, kEngineTrack, at));
  }
  push(TimelineRecord(What::decided, track.number, at));
  last_decision_ = at;
}

void Timeline::phase(const Track& track, Phase phase, int64_t begin) {
  last_phase_ = now();
  push(TimelineRecord(phase, track.number, begin, last_phase_));
}

// An operation settles right after its last phase; without a phase, right after its decision.
void Timeline::settled(Track& track, bool failed) {
  const int64_t at = failed ? now() : std::max(last_phase_, last_decision_);
  push(TimelineRecord(failed ? What::failed : What::settled, track.number, at));
  track.busy = false;
}

// Generated names are new each time, so they share a track, or as many tracks as operations are under way at once.
// Names beyond kMostTracks share tracks, too, since a program may make up names in each step.
Timeline::Track& Timeline::track_of(int process_set, std::string_view name) {
  const size_t cut = name.find(kUnnamed);
  if (cut == std::string_view::npos && (last_track_ < kMostTracks || tracks_[process_set].contains(name))) {
    return named(process_set, name);
  }
  const std::string_view common =
      cut == std::string_view::npos ? kOtherNames : name.substr(0, cut + kUnnamed.size() - 1);
  Track* track = &named(process_set, common);
  for (int lane = 2; track->busy; ++lane) {
    track = &named(process_set, std::string(common) + " (" + std::to_string(lane) + ")");
  }
  return *track;
}

Timeline::Track& Timeline::named(int process_set, std::string_view name) {
  auto& tracks = tracks_[process_set];
  const auto found = tracks.find(name);
  if (found != tracks.end()) return found->second;
  Track& track = tracks[std::string(name)];
  track.name = (process_set == 0 ? "" : "set " + std::to_string(process_set) + ": ") + std::string(name);
  track.number = ++last_track_;
  return track;
}

// Pushes both or none, so that the writer finds the description of every record.
bool Timeline::describe(const Track& track, const std::shared_ptr<const Request>& request) {
  if (records_.full() || !descriptions_.push({track.name, request})) return false;
  push(TimelineRecord(What::described, track.number));
  return true;
}

void Timeline::push(TimelineRecord&& record) {
  if (finishing_.load(std::memory_order_relaxed) || records_.push(std::move(record))) return;
  dropped_.fetch_add(1, std::memory_order_relaxed);
}

template <class T>
void Timeline::keep(std::vector<T>& list, size_t most, T&& value) {
  std::lock_guard lock(mutex_);
  if (finishing_) return;
  if (list.size() < most) {
    list.push_back(std::move(value));
  } else {
    dropped_.fetch_add(1, std::memory_order_relaxed);
  }
}

void Timeline::add(Moment&& moment) { keep(moments_, kDescriptions, std::move(moment)); }

void Timeline::add_error(const std::string& text) noexcept {
  try {
    add({"error: " + text, now(), false});
  } catch (const std::bad_alloc&) {
    dropped_.fetch_add(1, std::memory_order_relaxed);
  }
}

void Timeline::waited(int64_t begin) { keep(waits_, kRecords, TimelineRecord(Phase::wait, kWaitsTrack, begin, now())); }

// The thread that ends the timeline writes the remaining records: the writer's thread may not get to run for a while.
void Timeline::finish() {
  {
    std::lock_guard lock(mutex_);
    if (finishing_.exchange(true)) return;
  }
  changed_.notify_one();
  writer_.join();
  write([this] {
    write_records();
    recording_->finish(now());
  });
  recording_.reset();
}

void Timeline::run() {
  const BackgroundThread background("horovodish-time");
  const sched_param parameters{};
  pthread_setschedparam(pthread_self(), SCHED_IDLE, &parameters);
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kInterval, [this] { return finishing_.load(); })) {
    lock.unlock();
    write([this] { write_records(); });
    lock.lock();
  }
}

// If a trace cannot be written, it ends there. The engine goes on.
template <class Step>
void Timeline::write(Step step) noexcept {
  if (failed_) return;
  try {
    step();
  } catch (const std::exception& error) {
    failed_ = true;
    std::fprintf(stderr, "horovodish: warning: the timeline cannot be written any further: %s\n", error.what());
  }
}

void Timeline::write_records() {
  while (const auto record = records_.take()) {
    if (record->what == What::described) {
      recording_->describe(record->track, descriptions_.take().value());
    } else {
      recording_->take(*record);
    }
  }
  std::vector<Moment> moments;
  std::vector<TimelineRecord> waits;
  {
    std::lock_guard lock(mutex_);
    moments.swap(moments_);
    waits.swap(waits_);
  }
  for (const Moment& moment : moments) recording_->take(moment);
  for (const TimelineRecord& wait : waits) recording_->take(wait);
  recording_->flush(dropped_.load(std::memory_order_relaxed), now());
}

}  // namespace horovodish
