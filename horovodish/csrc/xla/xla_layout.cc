#include "xla/xla_layout.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace horovodish {

namespace {
size_t aligned(size_t bytes, size_t alignment) { return ceil_divide(bytes, alignment) * alignment; }

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
  for (const std::span<std::byte> argument : members_of(frame)) {
    total +=
        aligned(argument.size(), alignment) * (request.kind == Kind::reducescatter && !request.by_elements ? 2 : 1);
  }
  return total;
}

std::vector<Buffer> lay_out(const xla::CallFrame& frame, Request& request, const RankInGroup& place, std::byte* memory,
                            size_t alignment,
                            const std::function<void(std::byte* to, std::span<std::byte> argument)>& copy,
                            StartedCall& call) {
  const bool in_place = request.by_elements || request.kind == Kind::allreduce || request.kind == Kind::broadcast ||
                        request.kind == Kind::barrier;
  const auto ranks = static_cast<size_t>(place.size), index = static_cast<size_t>(place.rank);
  const std::vector<std::span<std::byte>> arguments = members_of(frame);
  size_t all = 0, elements = 0;  // of all members, and of those before
  for (const Member& member : request.members) all += request.by_elements ? static_cast<size_t>(member.count()) : 0;
  const Range part = part_of(request, all, index, ranks);
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < request.members.size(); ++i) {
    Member& member = request.members[i];
    const size_t bytes = arguments[i].size();
    call.members.push_back(member.name);
    copy(memory, arguments[i]);
    Buffer buffer{memory, in_place ? memory : nullptr};
    memory += aligned(bytes, alignment);
    if (request.by_elements) {
      const auto count = static_cast<size_t>(member.count());
      const Range own = overlap(part, {elements, count});
      const size_t item = bytes_of(member.dtype);
      call.results.emplace_back(buffer.target + (own.begin - elements) * item, own.count * item);
      elements += count;
    } else if (in_place) {
      call.results.emplace_back(buffer.target, bytes);
    } else if (request.kind == Kind::reducescatter) {
      const auto rows = static_cast<size_t>(member.shape.at(0));
      buffer.target = memory;
      call.results.emplace_back(memory, rows == 0 ? 0 : bytes / rows * rows_of(rows, index, ranks).count);
      memory += aligned(bytes, alignment);
    }
    if (request.any_rows()) {
      const int64_t rows = std::exchange(member.shape.at(0), Member::kAnyLength);
      buffer.rows = request.kind == Kind::allgather ? std::vector{rows} : even_splits(rows, place.size);
    }
    buffers.push_back(std::move(buffer));
  }
  return buffers;
}

}  // namespace horovodish
