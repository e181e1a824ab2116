#include "xla/xla_layout.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace horovodish {

namespace {
size_t aligned(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

std::vector<int64_t> even_splits(int64_t rows, int ranks) {
  if (rows % ranks != 0) {
    throw std::runtime_error(std::to_string(rows) + " rows cannot be divided evenly by " + std::to_string(ranks) +
                             " ranks. Remedy: pad them, or call it with splits outside of the compiled program.");
  }
  return std::vector<int64_t>(static_cast<size_t>(ranks), rows / ranks);
}
}  // namespace

size_t layout_bytes(const xla::CallFrame& frame, const Request& request, size_t alignment) {
  size_t total = alignment;
  for (const Target& argument : members_of(frame)) {
    total += aligned(argument.bytes, alignment) * (request.kind == Kind::reducescatter ? 2 : 1);
  }
  return total;
}

Layout lay_out(const xla::CallFrame& frame, Request& request, const Place& place, std::byte* memory, size_t alignment) {
  const bool in_place =
      request.kind == Kind::allreduce || request.kind == Kind::broadcast || request.kind == Kind::barrier;
  const auto ranks = static_cast<size_t>(place.size), index = static_cast<size_t>(place.rank);
  const std::vector<Target> arguments = members_of(frame);
  Layout layout;
  for (size_t i = 0; i < request.members.size(); ++i) {
    Member& member = request.members[i];
    const size_t bytes = arguments[i].bytes;
    layout.arguments.push_back(memory);
    Buffer buffer{memory, in_place ? memory : nullptr};
    memory += aligned(bytes, alignment);
    if (in_place) layout.results.push_back({buffer.target, bytes});
    if (request.kind == Kind::reducescatter) {
      const auto rows = static_cast<size_t>(member.shape.at(0));
      buffer.target = memory;
      layout.results.push_back({memory, rows == 0 ? 0 : bytes / rows * rows_of(rows, index, ranks).count});
      memory += aligned(bytes, alignment);
    }
    if (request.any_rows()) {
      const int64_t rows = std::exchange(member.shape.at(0), Member::kAnyLength);
      buffer.rows = request.kind == Kind::allgather ? std::vector{rows} : even_splits(rows, place.size);
    }
    layout.buffers.push_back(std::move(buffer));
  }
  return layout;
}

}  // namespace horovodish
