// A trace in Chrome's JSON array format, which Perfetto reads, written so that a process that is killed leaves a file
// that can be read: the format does without the closing bracket, and no event is ever written by halves.
//
// One event per line, the comma in front. Times are nanoseconds of the steady clock, in the file microseconds since an
// origin. A *track* is a row of the trace (a tid), a *slice* a bar on it; slices of a track nest.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace horovodish {

// `value` as a JSON string, shortened if need be.
std::string json_text(std::string_view value);

class TraceFile {
 public:
  // Takes over `descriptor`, of an empty file. `process`: the pid of its events.
  TraceFile(int descriptor, int process, int64_t origin);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  void name_process(std::string_view name);
  void name_track(uint64_t track, std::string_view name);
  // `arguments`: the inside of a JSON object, or nothing.
  void begin(uint64_t track, std::string_view name, int64_t at, std::string_view arguments = {});
  void end(uint64_t track, int64_t at, std::string_view arguments = {});
  void slice(uint64_t track, std::string_view name, int64_t begin, int64_t end);
  void mark(uint64_t track, std::string_view name, int64_t at, std::string_view arguments);
  // Hands what there is to the operating system.
  void flush();
  // The closing bracket.
  void finish();

 private:
  void open(std::string_view type, uint64_t track);
  void time(std::string_view key, int64_t nanoseconds);
  void name(std::string_view name);
  void close(std::string_view arguments);
  void add(std::string_view line);

  int descriptor_;  // -1 after an error
  const std::string process_;
  const int64_t origin_;
  std::string line_;  // under construction
  std::string page_;  // complete lines that are not written yet
  size_t written_ = 0;
  bool first_ = true;
};

}  // namespace horovodish
