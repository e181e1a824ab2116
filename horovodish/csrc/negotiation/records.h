// The records of a control message. Those that say nothing but an id become one when their ids are consecutive, which
// they are in a training that does the same in each step.
#pragma once

#include <cstdint>
#include <string>

#include "negotiation/wire.h"

namespace horovodish {

class Records : public Writer {
 public:
  // The types of two records: one about a single id, and one about a run of ids, with the first one and their number.
  static constexpr uint64_t kOne = 0, kRun = 1;

  // A record of another type, whose fields are written next.
  void begin(uint64_t type) {
    end_run();
    number(type);
  }
  void id(uint64_t id) {
    if (count_ == 0 || id != first_ + count_) {
      end_run();
      first_ = id;
    }
    ++count_;
  }
  std::string take() {
    end_run();
    return Writer::take();
  }

 private:
  void end_run() {
    if (count_ == 0) return;
    number(count_ == 1 ? kOne : kRun);
    number(first_);
    if (count_ > 1) number(count_);
    count_ = 0;
  }

  uint64_t first_ = 0, count_ = 0;  // a run of ids that is not written yet
};

}  // namespace horovodish
