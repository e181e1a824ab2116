// Converts a timeline's records to slices: each track has a slice for every operation, and in it the slices of its
// phases.
//
// Slices nest even if records are missing. If the end of an operation was dropped, it ends at the beginning of the next
// one on its track. If its beginning was dropped, its records are ignored. Phases are written when they end, so a trace
// that was cut off shows an operation without "negotiate" if that phase had not ended.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "timeline/recording.h"
#include "timeline/trace_file.h"

namespace horovodish {

// The arguments of an operation's slice, as members of a JSON object.
std::string arguments_of(const Request& request);

class TimelineWriter : public Recording {
 public:
  // As in TraceFile. `name`: of the process.
  TimelineWriter(int descriptor, int process, std::string_view name, int64_t origin);

  void describe(uint32_t number, const TrackDescription& description) override;
  void take(const TimelineRecord& record) override;
  void take(const Moment& moment) override;
  // Adds a mark if more records have been dropped since the last call.
  void flush(uint64_t dropped, int64_t at) override;
  void finish(int64_t at) override;

 private:
  struct Track {
    std::string_view kind;  // of its operations; empty while unknown
    std::string arguments;  // of its operations
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
