// The native calls of XLA programs, and their registration with a copy of XLA.
//
// A collective is two calls. `start` copies its arguments into memory of ours, hands them to the engine and returns at once. `done`
// depends on *all* operations that belong together, so that every one of them is under way before the program waits for any: the order
// in which a runtime happens to run its calls, which may differ by rank, then cannot make ranks wait for one another for ever. The
// memory is ours because a program that fails between the two calls frees its own while the engine still works on it.
//
// On the CPU, `start` gives the number of the operation. `done` never blocks: where the operation has not settled, it gives a future,
// which is fulfilled by a completion thread.
//
// On a CUDA device XLA runs the calls of a program one after the other on the host, ahead of the stream that computes. `start` puts
// copies of its arguments on that stream and hands them to the engine with an event. `done` waits until the operation is launched,
// which needs nothing of the GPU, makes the stream wait for the result, and copies it out. The host never waits for the GPU.
// The numbers that `start` gives lie in memory of the GPU, where the host cannot see them: nobody writes or reads them, they
// only keep every `start` before every `done`. An operation is found by the execution of the program and two attributes of
// both calls: group, a text that only operations which belong together share, and index (s64), its place among those.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "abi/xla_ffi.h"

namespace horovodish {

// Result: the number of the run of the program, s64[1]. Has no side effect, so that XLA makes one call of all that a program has.
abi::xla::Error* xla_run(abi::xla::CallFrame* frame);

// Arguments: see request_of(). Result: the number of the operation, s32[1]. Attributes: see start(). Never fails: what is wrong is kept for `done`.
abi::xla::Error* xla_start(abi::xla::CallFrame* frame);

// Argument: the numbers, s32[n], of which the first one is meant. The first `done` of operations that belong together is given
// the numbers of all of them. Results: the numbers again, and those of the operation.
abi::xla::Error* xla_done(abi::xla::CallFrame* frame);

// Argument: the numbers that a `done` gives, s32[n]. Result: all but the first one, s32[n - 1], for the next `done`. Has no
// side effect. XLA would compile a slice for a millisecond or ten.
abi::xla::Error* xla_rest(abi::xla::CallFrame* frame);

// As xla_start, of operations that NCCL can do. Attributes: group and index besides.
abi::xla::Error* xla_cuda_start(abi::xla::CallFrame* frame);

// Arguments, s32[1] each: of the first `done` of a group the numbers of all its operations, of each other one the number that
// the `done` before it gives. Results: a number, s32[1], and those of the operation. Attributes: group and index.
abi::xla::Error* xla_cuda_done(abi::xla::CallFrame* frame);

// Hands the parameters of a program on the CPU to Python when the program is first executed.
// Arguments: an array, then the parameters. Result: the array. Attributes: `key`, by which executions are counted, and
// `parameters`, a text that describes them. It has a side effect.
abi::xla::Error* xla_compare(abi::xla::CallFrame* frame);

// By their names. Platforms are "cpu" and "cuda".
std::vector<std::pair<const char*, abi::xla::Handler*>> xla_handlers(const std::string& platform);

// For frameworks that do not register handlers themselves. Once for each platform and table. Throws std::runtime_error
// where the interface is too old, or XLA refuses.
void register_xla_handlers(const abi::xla::Api& api, const std::string& platform);

}  // namespace horovodish
