// Collectives as calls of XLA programs on the CPU.
//
// A collective is two calls. `start` copies its arguments into memory of ours, hands them to the engine and returns at once
// with the number of the operation. `done` depends on the numbers of *all* operations that belong together, so that every
// one of them is under way before the program waits for any: the order in which a runtime happens to run its calls, which
// may differ by rank, then cannot make ranks wait for one another for ever. `done` never blocks: where the operation has not
// settled, it gives a future, which is fulfilled by a completion thread.
//
// The memory is ours because a program that fails between the two calls frees its own while the engine still works on it.
#pragma once

#include "abi/xla_ffi.h"

namespace horovodish {

// Result: the number of the run of the program, s64[1]. Has no side effect, so that XLA
// makes one call of all that a program has.
abi::xla::Error* xla_run(abi::xla::CallFrame* frame);

// Arguments: see request_of(). Result: the number of the operation, s32[1].
// Attributes: see start().
// Never fails: what is wrong is kept for `done`.
abi::xla::Error* xla_start(abi::xla::CallFrame* frame);

// Argument: the numbers, s32[n], of which the first one is meant. The first `done` of operations that belong together is given
// the numbers of all of them. Results: the numbers again, and those of the operation.
abi::xla::Error* xla_done(abi::xla::CallFrame* frame);

// Argument: the numbers that a `done` gives, s32[n]. Result: all but the first one, s32[n - 1], for the next `done`. Has no
// side effect. XLA would compile a slice for a millisecond or ten.
abi::xla::Error* xla_rest(abi::xla::CallFrame* frame);

}  // namespace horovodish
