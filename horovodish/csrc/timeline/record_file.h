// Raw records for `horovodish report`: a file of blocks. If a process is killed, the file can be read up to the last
// block.
//
// A block has 8 bytes for its type, 8 bytes for the length of its content, and the content. "records\n" has records in
// the layout of struct TimelineRecord, with times in nanoseconds since the origin; "objects\n" has one JSON object in a
// line. The first block is the object that describes the process.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "timeline/recording.h"

namespace horovodish {

class RecordFile : public Recording {
 public:
  // Takes over `descriptor`, of an empty file. `about`: the JSON object that describes the process.
  RecordFile(int descriptor, std::string_view about, int64_t origin);
  ~RecordFile() override;

  void describe(uint32_t number, const TrackDescription& description) override;
  void take(const TimelineRecord& record) override;
  void take(const Moment& moment) override;
  void flush(uint64_t dropped, int64_t at) override;
  void finish(int64_t at) override;

 private:
  void add_block(std::string_view kind, std::string_view content);

  int descriptor_;  // -1 after an error
  const int64_t origin_;
  std::vector<TimelineRecord> records_;  // not written yet; likewise the objects
  std::string objects_;
  uint64_t dropped_ = 0;
};

}  // namespace horovodish
