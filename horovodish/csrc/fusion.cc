#include "fusion.h"

#include <cstring>

#include "reduce.h"

namespace horovodish {

std::vector<Concatenation> Concatenation::by_dtype(const Operation& operation) {
  std::vector<Concatenation> result;
  const auto& members = operation.request->members;
  for (size_t i = 0; i < members.size(); ++i) {
    auto same = std::find_if(result.begin(), result.end(), [&](const auto& c) { return c.dtype_ == members[i].dtype; });
    if (same == result.end()) same = result.insert(result.end(), Concatenation(members[i].dtype));
    same->append(operation.buffers[i].source, operation.buffers[i].target, static_cast<size_t>(members[i].count()));
  }
  return result;
}

Concatenation Concatenation::as_bytes(const Operation& operation) {
  Concatenation result(DType::uint8);
  const auto& members = operation.request->members;
  for (size_t i = 0; i < members.size(); ++i) {
    result.append(operation.buffers[i].source, operation.buffers[i].target,
                  static_cast<size_t>(members[i].count()) * bytes_of(members[i].dtype));
  }
  return result;
}

void Concatenation::append(const std::byte* source, std::byte* target, size_t count) {
  if (count == 0) return;
  segments_.push_back({source, target, count_, count});
  count_ += count;
}

void Concatenation::pack(size_t begin, size_t count, ReduceOp op, std::byte* out) const {
  const size_t item = item_bytes();
  for_each_piece(begin, count, [&](const Segment& segment, size_t first, size_t length, size_t position) {
    if (segment.source == nullptr) {
      fill_neutral(dtype_, op, out + position * item, length);
    } else {
      std::memcpy(out + position * item, segment.source + first * item, length * item);
    }
  });
}

void Concatenation::unpack(size_t begin, size_t count, const std::byte* in) const {
  const size_t item = item_bytes();
  for_each_piece(begin, count, [&](const Segment& segment, size_t first, size_t length, size_t position) {
    if (segment.target != nullptr) std::memcpy(segment.target + first * item, in + position * item, length * item);
  });
}

}  // namespace horovodish
