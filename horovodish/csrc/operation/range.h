// Parts of a whole.
#pragma once

#include <algorithm>
#include <cstddef>

namespace horovodish {

// Some of the elements, rows or bytes of a whole.
struct Range {
  size_t begin, count;
  size_t end() const { return begin + count; }
};

// The intersection of two ranges of one whole. An empty one lies within the second range.
inline Range overlap(Range one, Range other) {
  const size_t begin = std::clamp(one.begin, other.begin, other.end());
  return {begin, std::clamp(one.end(), begin, other.end()) - begin};
}

inline size_t ceil_divide(size_t a, size_t b) { return (a + b - 1) / b; }

// Piece `index` of a whole that is cut into pieces of `length`. The last piece may be shorter, and pieces after it are
// empty.
inline Range piece_of(size_t whole, size_t length, size_t index) {
  const size_t begin = std::min(index * length, whole);
  return {begin, std::min(length, whole - begin)};
}

// The rows of a reducescatter's member that rank `index` of `ranks` gets. The parts are as even as possible; the first
// ranks get one row more.
inline Range rows_of(size_t rows, size_t index, size_t ranks) {
  const size_t base = rows / ranks, more = rows % ranks;
  return {index * base + std::min(index, more), base + (index < more ? 1 : 0)};
}

// The elements of a concatenation that rank `index` of `ranks` gets. The parts are as even as possible. A ring cuts an
// allreduce in the same way, so the sums have the same bits.
inline Range elements_of(size_t count, size_t index, size_t ranks) {
  const auto begin = [&](size_t i) { return count / ranks * i + count % ranks * i / ranks; };
  return {begin(index), begin(index + 1) - begin(index)};
}

}  // namespace horovodish
