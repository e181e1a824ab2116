// A trace in Chrome's JSON array format, which Perfetto reads. The file of a killed process can be read: the format
// does not need the closing bracket, and no event is ever half written.
//
// One event per line, the comma in front. Times are nanoseconds of the steady clock, in the file microseconds since an
// origin. A *track* is a row of the trace (a tid), a *slice* a bar on it; slices of a track nest.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace horovodish {

// `value` as a JSON string, shortened if need be.
std::string json_text(std::string_view value);

// Writes all of `text`. An error prints a warning, closes the descriptor and sets it to -1; after that this does
// nothing.
void write_whole(int& descriptor, std::string_view text);

class TraceFile {
 public:
  // Takes over `descriptor`, of an empty file. `process`: the pid of its events.
  TraceFile(int descriptor, int process, int64_t origin);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // An event of the format.
  struct Event {
    char type;  // B and E: a slice begins and ends; X: a slice; i: a mark; M: the name of the process or of a track
    uint64_t track = 0;
    std::string_view name = {};
    std::optional<int64_t> at = {}, length = {};
    std::string_view arguments = {};  // the inside of a JSON object, or nothing
  };
  void add(const Event& event);
  // Hands the data so far to the operating system.
  void flush();
  // Writes the closing bracket.
  void finish();

 private:
  void time(std::string_view key, int64_t nanoseconds);
  void add_line(std::string_view line);

  int descriptor_;  // -1 after an error
  const std::string process_;
  const int64_t origin_;
  std::string line_;  // under construction
  std::string page_;  // complete lines that are not written yet
  size_t written_ = 0;
  bool first_ = true;
};

}  // namespace horovodish
