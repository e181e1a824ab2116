// A call that hands the parameters of an XLA program on the CPU to Python when the program is first executed.
#pragma once

#include "abi/xla_ffi.h"

namespace horovodish {

// Arguments: an array, then the parameters. Result: the array. Attributes: `key`, by which executions are counted, and
// `parameters`, a text that describes them. It has a side effect.
abi::xla::Error* xla_compare(abi::xla::CallFrame* frame);

}  // namespace horovodish
