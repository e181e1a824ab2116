// What the timeline's thread does with the records that it takes from the ring.
#pragma once

#include <cstdint>

#include "timeline/timeline.h"

namespace horovodish {

class Recording {
 public:
  virtual ~Recording() = default;

  // What the operations on a track are about, from the next one on.
  virtual void describe(uint32_t number, const TrackDescription& description) = 0;
  // Of anything but a description.
  virtual void take(const TimelineRecord& record) = 0;
  virtual void take(const Moment& moment) = 0;
  // Hands what there is to the operating system. `dropped`: how many records were, so far.
  virtual void flush(uint64_t dropped, int64_t at) = 0;
  // Ends what has not ended, and the file.
  virtual void finish(int64_t at) = 0;
};

}  // namespace horovodish
