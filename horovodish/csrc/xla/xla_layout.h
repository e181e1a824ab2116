// The layout of a call's arguments and results in one piece of our own memory.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "operation/operation.h"
#include "operation/range.h"
#include "xla/xla_call.h"

namespace horovodish {

// The size of the memory for the call, with every tensor at a multiple of `alignment`. Never 0.
size_t layout_bytes(const xla::CallFrame& frame, const Request& request, size_t alignment);

// Lays the call out in that memory, and returns the buffers of the operation. `copy` copies each argument to its place.
// `call` gets the names of the members, and the places of the results. If the engine allocates the results, this takes
// the number of rows out of the request's shapes. `place`: this rank's index in the process set.
std::vector<Buffer> lay_out(const xla::CallFrame& frame, Request& request, const RankInGroup& place, std::byte* memory,
                            size_t alignment,
                            const std::function<void(std::byte* to, std::span<std::byte> argument)>& copy,
                            StartedCall& call);

}  // namespace horovodish
