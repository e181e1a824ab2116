// What the timeline's thread does with the records from the ring.
#pragma once

#include <cstdint>

#include "timeline/timeline.h"

namespace horovodish {

class Recording {
 public:
  virtual ~Recording() = default;

  // Describes the operations on a track, from the next one on.
  virtual void describe(uint32_t number, const TrackDescription& description) = 0;
  // Takes a record other than a description.
  virtual void take(const TimelineRecord& record) = 0;
  virtual void take(const Moment& moment) = 0;
  // Hands the data so far to the operating system. `dropped`: how many records were dropped so far.
  virtual void flush(uint64_t dropped, int64_t at) = 0;
  // Ends the open slices, and the file.
  virtual void finish(int64_t at) = 0;
};

}  // namespace horovodish
