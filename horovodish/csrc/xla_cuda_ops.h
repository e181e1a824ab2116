// Collectives as calls of XLA programs on a CUDA device; two calls for each, as in xla_ops.h.
//
// XLA runs the calls of a program one after the other on the host, ahead of the stream that computes. `start` puts copies of
// its arguments on that stream and hands them to the engine with an event. `done` waits until the operation is launched,
// which needs nothing of the GPU, makes the stream wait for the result, and copies it out. The host never waits for the GPU.
//
// The numbers that `start` gives lie in memory of the GPU, where the host cannot see them: nobody writes or reads them, they
// only keep every `start` before every `done`. An operation is found by the execution of the program, its process set and
// its name.
#pragma once

#include "abi/xla_ffi.h"

namespace horovodish {

// As xla_start, of operations that NCCL can do.
abi::xla::Error* xla_cuda_start(abi::xla::CallFrame* frame);

// Arguments: the numbers of all operations that belong together, s32[1] each. Results: those of the operation. Attributes:
// calls: a line for each operation, with its process set, a space and its name; index (s64): of the line that is meant.
abi::xla::Error* xla_cuda_done(abi::xla::CallFrame* frame);

}  // namespace horovodish
