// Where the arguments and the results of a call lie in one piece of memory of ours.
#pragma once

#include <cstddef>
#include <vector>

#include "operation/operation.h"
#include "operation/range.h"
#include "xla/xla_call.h"

namespace horovodish {

// How much memory the call needs, with every tensor in it at a multiple of `alignment`. Never 0.
size_t layout_bytes(const xla::CallFrame& frame, const Request& request, size_t alignment);

struct Layout {
  std::vector<std::byte*> arguments;  // where copies of them go
  std::vector<Buffer> buffers;        // of the operation
  std::vector<Target> results;        // none where the engine allocates them
};

// Lays the call out in that memory. Of a request whose results the engine allocates, it takes the number of rows out of the
// shapes. `place`: of this rank in the process set.
Layout lay_out(const xla::CallFrame& frame, Request& request, const Place& place, std::byte* memory, size_t alignment);

}  // namespace horovodish
