// The native calls of XLA programs, and their registration with a copy of XLA.
//
// A collective is two calls. `start` copies its arguments into our own memory, hands them to the engine and returns at
// once. `done` depends on *all* operations that belong together, so every one of them is under way before the program
// waits for any. A runtime may run its calls in an order that differs by rank, and the ranks still cannot wait for one
// another for ever. We need our own memory because a program that fails between the two calls frees its memory while
// the engine still works on it.
//
// On the CPU, `start` gives the number of the operation. `done` never blocks: if the operation has not settled, it
// gives a future that a completion thread fulfils.
//
// On a CUDA device, XLA runs the calls of a program one after the other on the host, ahead of the stream that computes.
// `start` puts copies of its arguments on that stream and hands them to the engine with an event. `done` waits until
// the operation is launched, which does not depend on the GPU. It then makes the stream wait for the result, and copies
// the result out. The host never waits for the GPU. The numbers from `start` lie in GPU memory, where the host cannot
// see them. Nobody writes or reads them: they only keep every `start` before every `done`. To find an operation, the
// engine uses the execution of the program and two attributes of both calls: group, a text that only operations which
// belong together share, and index (s64), the place in the group.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "abi/xla_ffi.h"

namespace horovodish {

// Result: the number of the run of the program, s64[1]. Has no side effect, so XLA merges all such calls of a program
// into one.
abi::xla::Error* xla_run(abi::xla::CallFrame* frame);

// Arguments and attributes: see start(). Result: the number of the operation, s32[1]. Never fails: an error is kept
// for `done`.
abi::xla::Error* xla_start(abi::xla::CallFrame* frame);

// Argument: the numbers, s32[n]; the first one counts. The first `done` of operations that belong together gets the
// numbers of all of them. Results: the numbers again, and the results of the operation.
abi::xla::Error* xla_done(abi::xla::CallFrame* frame);

// Argument: the numbers that a `done` gives, s32[n]. Result: all but the first one, s32[n - 1], for the next `done`.
// Has no side effect. A slice would cost XLA one to ten milliseconds of compilation.
abi::xla::Error* xla_rest(abi::xla::CallFrame* frame);

// As xla_start, for operations that NCCL can carry out. Has two more attributes: group and index.
abi::xla::Error* xla_cuda_start(abi::xla::CallFrame* frame);

// Arguments, s32[1] each: for the first `done` of a group, the numbers of all its operations; for every other one, the
// number from the `done` before it. Results: a number, s32[1], and the results of the operation. Attributes: group and
// index.
abi::xla::Error* xla_cuda_done(abi::xla::CallFrame* frame);

// Hands the parameters of a program on the CPU to Python when the program is first executed.
// Arguments: an array, then the parameters. Result: the array. Attributes: `key`, whose executions are counted, and
// `parameters`, a text that describes them. It has a side effect.
abi::xla::Error* xla_compare(abi::xla::CallFrame* frame);

// The handlers by name. Platforms are "cpu" and "cuda".
std::vector<std::pair<const char*, abi::xla::Handler*>> xla_handlers(const std::string& platform);

// For frameworks that do not register handlers themselves. Call it once for each platform and table. Throws
// std::runtime_error if the interface is too old, or XLA refuses.
void register_xla_handlers(const abi::xla::Api& api, const std::string& platform);

}  // namespace horovodish
