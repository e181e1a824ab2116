// The engine for libraries that a framework opens by itself, such as the library of TensorFlow's operations. They share
// no symbols with the engine, so they call it through an object whose address Python passes on. Both sides are built
// together.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "negotiation/request.h"
#include "negotiation/world_rank.h"
#include "operation/handle.h"
#include "operation/operation.h"

namespace horovodish {

struct Submission {
  Request request;  // its members have the shapes of this rank
  std::vector<Buffer> buffers;  // of the members; without a target if the engine allocates the result
  int process_set = 0;
  std::string ranks;  // the ranks of the set that the call was written for, as in RankInGroup
  std::vector<int64_t> splits;  // of an alltoall; empty for even ones
  // Begins a step, and describes parameters for Python, see executions.h. In a reduction, only one operation has it.
  std::string compared;
  std::string codec;  // see compression_of()
};

class EngineInterface {
 public:
  static constexpr int kThisHost = -1;  // used in place of a process set

  // Hands an operation over. `memory` owns its memory: see Operation. `then` is called once, with the settled handle.
  // If the operation is refused or settles at once, this thread may call it before submit() returns. Otherwise a thread
  // of the engine calls it after the operation has settled.
  virtual void submit(Submission submission, std::shared_ptr<void> memory, Then then) const noexcept = 0;
  // This rank in a process set; for kThisHost: among the ranks of its host. Before init(): in no set. Never waits.
  virtual RankInGroup place(int process_set) const noexcept = 0;
  // See EngineOptions. False before init().
  virtual bool horovods_gradients() const noexcept = 0;

 protected:
  ~EngineInterface() = default;
};

const EngineInterface& engine_interface();

}  // namespace horovodish
