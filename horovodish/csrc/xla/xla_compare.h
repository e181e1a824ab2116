// What passes the parameters of an XLA program on the CPU to Python, at its first execution.
#pragma once

#include "abi/xla_ffi.h"

namespace horovodish {

// Arguments: an array, then the parameters. Result: the array. Attributes: key, of which the first execution calls Python, and
// parameters, a text that describes them. Has a side effect.
abi::xla::Error* xla_compare(abi::xla::CallFrame* frame);

}  // namespace horovodish
