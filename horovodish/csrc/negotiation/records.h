// A control message is a sequence of records: the number of a type, then its fields. Consecutive records that contain
// only an id become one record if their ids are consecutive, as they are in a training that does the same in each step.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "negotiation/wire.h"

namespace horovodish {

// The records of one message, of these types. `ById` has an `id`, and often contains nothing else.
template <class ById, class... Others>
class Records {
 public:
  void add(const ById& record) {
    if (record.is_only_an_id()) return add_id(record.id);
    add_typed(record, kInFull);
  }
  template <class Record>
  void add(const Record& record) {
    uint64_t type = kOthers;
    (void)((std::is_same_v<Record, Others> || (++type, false)) || ...);
    add_typed(record, type);
  }
  std::string take() {
    end_run();
    return writer_.take();
  }

  // Gives the receiver every record of a message.
  template <class Receiver>
  static void read(std::string_view message, Receiver&& receiver) {
    Reader reader(message);
    while (!reader.done()) {
      const uint64_t type = reader.number();
      if (type <= kRun) {
        ById record{.id = reader.read<uint32_t>()};
        const uint32_t end = record.id + (type == kRun ? reader.read<uint32_t>() : 1);
        for (; record.id != end; ++record.id) receiver(record);
      } else if (type == kInFull) {
        auto record = reader.read<ById>();
        receiver(record);
      } else {
        uint64_t other = kOthers;
        const bool known = ((type == other++ && (receiver(reader.read<Others>()), true)) || ...);
        if (!known) throw std::runtime_error("control message: unknown record");
      }
    }
  }

 private:
  // The numbers of the types: a single id; a run of ids (first id and count); a `ById` with more than an id; the other
  // types from here.
  static constexpr uint64_t kOne = 0, kRun = 1, kInFull = 2, kOthers = 3;

  template <class Record>
  void add_typed(const Record& record, uint64_t type) {
    end_run();
    writer_.number(type);
    writer_.write(record);
  }
  void add_id(uint32_t id) {
    if (count_ == 0 || id != first_ + count_) {
      end_run();
      first_ = id;
    }
    ++count_;
  }
  void end_run() {
    if (count_ == 0) return;
    writer_.number(count_ == 1 ? kOne : kRun);
    writer_.number(first_);
    if (count_ > 1) writer_.number(count_);
    count_ = 0;
  }

  Writer writer_;
  uint32_t first_ = 0, count_ = 0;  // a run of ids that is not written yet
};

}  // namespace horovodish
