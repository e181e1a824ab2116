// How bytes move. One file pair per plane behind this contract.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "operation/operation.h"

namespace horovodish {

enum class Progress { done, pending, progressed };  // of two planes together: the greater one

class Plane {
 public:
  // Called with every operation that is complete, in the order in which they were started.
  using OnComplete = std::function<void(const std::shared_ptr<Operation>&)>;
  // Called with an operation that cannot be carried out, on all ranks alike, while the plane goes on.
  using OnRefuse = std::function<void(const std::shared_ptr<Operation>&, const Error&)>;

  // An operation that a device has been given and has not done yet.
  struct Launched {
    uint64_t number;  // ascends from one to the next
    std::shared_ptr<const Request> request;
    std::chrono::steady_clock::time_point since;
    bool has_inputs;  // the device has come to it, so the inputs are there
  };

  virtual ~Plane() = default;
  // Takes over a decided operation. All ranks start the same operations in the same order.
  virtual void start(std::shared_ptr<Operation> operation) = 0;
  // Moves on as far as possible without waiting. `done`: nothing is under way. `pending`: everything waits for a peer.
  // Throws when an operation cannot be completed; the engine then abandons the plane.
  virtual Progress advance() = 0;
  // Must the engine look again by itself, because nobody rings its doorbell when a peer's data arrives?
  virtual bool needs_polling() const { return false; }
  // Must the engine look now and then although nothing is under way, because what it has launched may fail?
  virtual bool needs_watching() const { return false; }
  // Of what is launched and not done, the operation that was launched first.
  virtual std::optional<Launched> oldest_launched() const { return std::nullopt; }
  // This rank is about to leave: waits for what it has launched, for a time, because its peers may need it.
  virtual void drain(std::chrono::milliseconds) {}
  // The plane is about to be destroyed, for this reason. What is launched and does not come to its end then is lost.
  virtual void about_to_end(const Error&) noexcept {}
};

}  // namespace horovodish
