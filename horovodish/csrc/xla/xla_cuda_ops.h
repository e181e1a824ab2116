// Collectives as calls of XLA programs on a CUDA device; two calls for each, as in xla_ops.h.
//
// XLA runs the calls of a program one after the other on the host, ahead of the stream that computes. `start` puts copies of
// its arguments on that stream and hands them to the engine with an event. `done` waits until the operation is launched,
// which needs nothing of the GPU, makes the stream wait for the result, and copies it out. The host never waits for the GPU.
//
// The numbers that `start` gives lie in memory of the GPU, where the host cannot see them: nobody writes or reads them, they
// only keep every `start` before every `done`. An operation is found by the execution of the program and two attributes of
// both calls: group, a text that only operations which belong together share, and index (s64), its place among those.
#pragma once

#include "abi/xla_ffi.h"

namespace horovodish {

// As xla_start, of operations that NCCL can do. Attributes: group and index besides.
abi::xla::Error* xla_cuda_start(abi::xla::CallFrame* frame);

// Arguments, s32[1] each: of the first `done` of a group the numbers of all its operations, of each other one the number that
// the `done` before it gives. Results: a number, s32[1], and those of the operation. Attributes: group and index.
abi::xla::Error* xla_cuda_done(abi::xla::CallFrame* frame);

}  // namespace horovodish
