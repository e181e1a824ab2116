// How bytes move. One file pair per plane behind this contract.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "operation/operation.h"
#include "planes/residuals.h"

namespace horovodish {

// Keeps memory until the process ends: a transfer that was given up may go on reading and writing it. Needs no memory itself.
inline void keep_for_ever(std::shared_ptr<void> memory) noexcept {
  union Undestroyed {
    explicit Undestroyed(std::shared_ptr<void>&& its) : share(std::move(its)) {}
    ~Undestroyed() {}  // NOLINT: does not destroy the share
    std::shared_ptr<void> share;
  } const undestroyed(std::move(memory));
}

enum class Progress { done, pending, progressed };  // of two together: the greater one

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
  // Throws when an operation cannot be completed; the engine then destroys the plane.
  // A plane that cannot stop a transfer keeps a share of its operation's memory.
  virtual Progress advance() = 0;
  // Must the engine look again by itself, because nobody rings its doorbell when a peer's data arrives?
  virtual bool needs_polling() const { return false; }
  // A report for each tensor that this rank has encoded.
  virtual std::vector<Residuals::Report> code_reports() const { return {}; }
  // Whether something is launched that may still fail. The engine then looks now and then, although nothing is under way.
  virtual bool may_fail_after_launch() const { return false; }
  // Of what is launched and not done, the operation that was launched first.
  virtual std::optional<Launched> oldest_launched() const { return std::nullopt; }
  // This rank is about to leave: waits for what it has launched, for a time, because its peers may need it.
  virtual void drain(std::chrono::milliseconds) {}
  // The plane is about to be destroyed, for this reason. What is launched and does not come to its end then is lost.
  virtual void about_to_end(const Error&) noexcept {}
};

}  // namespace horovodish
