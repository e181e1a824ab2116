// Where the arguments and the results of a call lie in one piece of memory of ours.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "operation/operation.h"
#include "operation/range.h"
#include "xla/xla_call.h"

namespace horovodish {

// How much memory the call needs, with every tensor in it at a multiple of `alignment`. Never 0.
size_t layout_bytes(const xla::CallFrame& frame, const Request& request, size_t alignment);

// Lays the call out in that memory, and returns the buffers of the operation. Each argument is copied to its place by
// `copy`. `call` gets the names of the members, and where the results will be. Of a request whose results the engine allocates,
// this takes the number of rows out of the shapes. `place`: of this rank in the process set.
std::vector<Buffer> lay_out(const xla::CallFrame& frame, Request& request, const RankInGroup& place, std::byte* memory,
                            size_t alignment,
                            const std::function<void(std::byte* to, std::span<std::byte> argument)>& copy,
                            StartedCall& call);

}  // namespace horovodish
