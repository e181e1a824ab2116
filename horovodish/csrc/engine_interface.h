// The engine for libraries of their own that a framework opens, such as that of TensorFlow's operations. They share no symbols with
// this one, so they get its functions by an object whose address Python passes on. Both sides are built together.
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
  std::vector<Buffer> buffers;  // of the members; without a target where the engine allocates the result
  int process_set = 0;
  std::string ranks;  // of the set for which the call was written, as in RankInGroup
  std::vector<int64_t> splits;  // of an alltoall; empty for even ones
  // Begins a step, and describes parameters for Python, see executions.h; empty of all but one operation of a reduction.
  std::string compared;
  std::string codec;  // see compression_of()
};

class EngineInterface {
 public:
  static constexpr int kThisHost = -1;  // in the place of a process set

  // Hands an operation over, whose memory `memory` owns: see Operation. `then` is called once with the settled handle: from this thread
  // before submit() returns when the operation is refused or settles at once, which it may take a moment to see, else from a thread of
  // its own once it has settled.
  virtual void submit(Submission submission, std::shared_ptr<void> memory, Then then) const noexcept = 0;
  // This rank in a process set, or kThisHost: among the ranks of its host. Of no set before init(). Never waits.
  virtual RankInGroup place(int process_set) const noexcept = 0;
  // See EngineOptions. False before init().
  virtual bool horovods_gradients() const noexcept = 0;

 protected:
  ~EngineInterface() = default;
};

const EngineInterface& engine_interface();

}  // namespace horovodish
