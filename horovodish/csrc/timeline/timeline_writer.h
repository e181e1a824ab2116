// What the records of a timeline mean, as slices: each track has one for every operation, and in it its phases.
//
// Whatever records are missing, slices nest: an operation whose end was dropped ends where the next one on its track
// begins, and records of an operation whose beginning was dropped are ignored. Phases are written when they end; a trace
// that was cut off shows an operation without "negotiate" where that had not ended.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "timeline/recording.h"
#include "timeline/trace_file.h"

namespace horovodish {

// What an operation is about, as members of a JSON object.
std::string arguments_of(const Request& request);

class TimelineWriter : public Recording {
 public:
  // As TraceFile. `name`: of the process.
  TimelineWriter(int descriptor, int process, std::string_view name, int64_t origin);

  void describe(uint32_t number, const TrackDescription& description) override;
  void take(const TimelineRecord& record) override;
  void take(const Moment& moment) override;
  // A mark says when there are more dropped records than last time.
  void flush(uint64_t dropped, int64_t at) override;
  void finish(int64_t at) override;

 private:
  struct Track {
    std::string_view kind;  // of its operations; empty while nothing is known of them
    std::string arguments;  // that describe them
    bool named = false;
    bool busy = false;  // shows an operation
    std::string_view waits{};  // "negotiate" or "queue", while it does
    int64_t last = 0;  // the time of its last event
  };

  void name_track(uint32_t number, std::string_view name);
  Track& track(uint32_t number);
  void submitted(uint32_t number, int64_t at);
  void slice(uint32_t number, std::string_view name, int64_t begin, int64_t end);
  void end_waiting(uint32_t number, int64_t at);
  void end(uint32_t number, int64_t at, bool failed);
  void mark(uint32_t number, std::string_view name, int64_t at, std::string_view arguments = {});

  TraceFile file_;
  std::vector<Track> tracks_;  // by number
  uint64_t dropped_ = 0;
};

}  // namespace horovodish
