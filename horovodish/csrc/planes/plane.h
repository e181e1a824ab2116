// How bytes move. Each plane is a file pair behind this contract.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "memory/clock.h"
#include "operation/operation.h"
#include "planes/residuals.h"

namespace horovodish {

// Keeps memory until the process ends, because an abandoned transfer may go on reading and writing it. Needs no memory
// itself.
inline void keep_for_ever(std::shared_ptr<void> memory) noexcept {
  union Undestroyed {
    explicit Undestroyed(std::shared_ptr<void>&& its) : share(std::move(its)) {}
    ~Undestroyed() {}  // NOLINT: does not destroy the share
    std::shared_ptr<void> share;
  } const undestroyed(std::move(memory));
}

// Called once for each operation that has ended: with null, or with an error if it could not be carried out.
using OnEnd = std::function<void(const std::shared_ptr<Operation>&, const Error*)>;

class Plane {
 public:
  // An operation that a device has been given and has not completed.
  struct Launched {
    uint64_t number;  // larger than the number of the operation before
    Clock::time_point since;
    std::shared_ptr<const Request> request;
    std::vector<std::shared_ptr<DeviceEvent>> inputs;  // when the inputs are ready, on streams of the framework
    std::shared_ptr<DeviceEvent> done;
    std::shared_ptr<Handle> handle;
    std::shared_ptr<void> memory;  // of the operation

    // Returns whether the device has reached the operation.
    bool has_inputs() const {
      return std::ranges::all_of(inputs, [](const auto& event) { return event->done(); });
    }
  };

  virtual ~Plane() = default;
  // Takes over a decided operation. All ranks start the same operations in the same order, and they end in this order.
  virtual void start(std::shared_ptr<Operation> operation) = 0;
  // Moves on as far as possible without waiting. Returns true if something has moved. Throws if an operation cannot be
  // completed; the engine then destroys the plane. A plane that cannot stop a transfer keeps a share of its operation's
  // memory.
  virtual bool advance() = 0;
  // Returns whether the engine must look again by itself, because nobody rings its doorbell when a peer's data arrives.
  virtual bool needs_polling() const { return false; }
  // A report for each tensor that this rank has encoded.
  virtual std::vector<Residuals::Report> code_reports() const { return {}; }
  // The first launched operation that is not done; null if there is none. It may still fail, so the engine looks now
  // and then, even if nothing is under way.
  virtual const Launched* oldest_launched() const { return nullptr; }
  // This rank is about to leave: waits for its launched operations, within a time limit, because its peers may need
  // them.
  virtual void drain(std::chrono::milliseconds) {}
  // The plane is about to be destroyed, for this reason. Launched operations that do not complete by then are lost.
  virtual void about_to_end(const Error&) noexcept {}
};

}  // namespace horovodish
