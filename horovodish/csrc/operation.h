// A collective on this rank, from its submission to its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "handle.h"
#include "negotiation.h"
#include "reduce.h"
#include "request.h"

namespace horovodish {

// The memory of one member. Null pointers stand for a rank that has joined: it contributes the neutral value and wants no
// result. The output of an allgather is allocated by the plane.
struct Buffer {
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  int64_t first_dim = 0;  // of this rank's contribution to an allgather
};

struct Operation {
  std::shared_ptr<const Request> request;
  std::shared_ptr<const std::string> signature;
  std::vector<Buffer> buffers;  // one per member
  Mask absent;                  // members that this rank has no value for; once decided, that no rank has a value for
  int contributors = 0;         // known once decided
  std::shared_ptr<Handle> handle;
  bool reported = false;        // shows up in Engine::take_settled()

  Scaling scaling() const {
    return {request->prescale, request->postscale, request->op == ReduceOp::average ? contributors : 1};
  }
};

// Bytes of one row of an allgather's member.
inline size_t row_bytes(const Member& member) { return static_cast<size_t>(member.count()) * bytes_of(member.dtype); }

// Adds the output of the next member of an allgather to the handle, once every rank's first dimension is known.
inline Handle::Output& allocate_gathered(Operation& operation, size_t member, const std::vector<int64_t>& first_dims) {
  int64_t rows = 0;
  for (const int64_t first_dim : first_dims) rows += first_dim;
  const size_t bytes = row_bytes(operation.request->members[member]) * static_cast<size_t>(rows);
  auto& outputs = operation.handle->outputs;
  outputs.push_back({std::make_unique_for_overwrite<std::byte[]>(bytes), bytes, first_dims});
  return outputs.back();
}

}  // namespace horovodish
