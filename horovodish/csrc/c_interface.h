// The engine as a table of C functions, for libraries of their own that a framework opens, such as that of TensorFlow's
// operations. They share no symbols with this one; Python passes the table's address on. Both sides are built together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "arithmetic/types.h"

namespace horovodish::c_interface {

struct Tensor {
  const void* source = nullptr;
  void* target = nullptr;  // null where the engine allocates the result
  DType dtype = DType::float32;
  int dimensions = 0;
  const int64_t* dims = nullptr;
  const char* name = nullptr;  // null where it follows from that of the operation
  const char* label = nullptr;  // see Member; null where it has none
};

struct Submission {
  Kind kind = Kind::allreduce;
  const char* name = nullptr;
  const char* family = nullptr;  // see Family; null where the operation stands alone
  int64_t run = 0;  // of the family
  ReduceOp op = ReduceOp::sum;
  double prescale = 1.0;
  double postscale = 1.0;
  int root = 0;  // of the world
  int process_set = 0;
  const char* ranks = nullptr;  // of the set for which the call was written, as in RankInGroup
  const Tensor* tensors = nullptr;
  size_t tensor_count = 0;
  const int64_t* splits = nullptr;  // of an alltoall; null for even ones
  size_t split_count = 0;
  // Begins a step, and describes parameters for Python, see executions.h; null of all but one operation of a reduction.
  const char* compared = nullptr;
  const char* codec = "";  // see compression_of()
};

// A result that the engine allocated.
struct Output {
  const void* data = nullptr;
  size_t bytes = 0;
  const int64_t* rows = nullptr;  // that came from every rank
  size_t ranks = 0;
};

struct Outcome {
  const char* error_class = nullptr;  // in horovodish.errors; null for success
  const char* message = nullptr;
  const Output* outputs = nullptr;
  size_t output_count = 0;
  int last_joined = -1;
};

// As engine.h has it; before init() as of no set.
struct RankInGroup {
  int rank = -1;
  int size = 0;
  bool horovods_gradients = false;  // see EngineOptions
};

inline constexpr int kThisHost = -1;  // in the place of a process set

struct Table {
  // Hands an operation over. `then` is called once, with an outcome that lives as long as the call: from this thread
  // before submit() returns when the operation is refused or settles at once, which it may take a moment to see, else
  // from a thread of its own once it has settled. `owner` owns the memory of the tensors. `let_go` is called once, after `then`,
  // when nothing uses that memory any more, which may be never.
  void (*submit)(const Submission*, void (*then)(void* owner, const Outcome*), void (*let_go)(void* owner),
                 void* owner);
  // This rank in a process set, or kThisHost: among the ranks of its host. Never waits.
  RankInGroup (*place)(int process_set);
};

const Table& table();

}  // namespace horovodish::c_interface
