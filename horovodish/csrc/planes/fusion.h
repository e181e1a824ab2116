// Fusion: the tensors of a bucket seen as one long vector. Nothing is laid end to end in memory; a plane asks for
// ranges of the concatenation and gets the pieces of the tensors that they cover, so that packing goes straight from
// the tensors into cache-sized chunks and unpacking straight back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "arithmetic/types.h"
#include "operation/operation.h"

namespace horovodish {

// The dtypes of a request's members, in the order of first appearance.
std::vector<DType> dtypes_of(const Request& request);

class Concatenation {
 public:
  struct Segment {
    const std::byte* source;  // null: the neutral value
    std::byte* target;        // null: the result is not wanted
    size_t begin;             // elements before this segment
    size_t count;
  };

  explicit Concatenation(DType dtype) : dtype_(dtype) {}

  // The members of an allreduce, one concatenation per dtype in the order of first appearance.
  static std::vector<Concatenation> by_dtype(const Operation& operation);
  // All members as bytes, for collectives that only move data.
  static Concatenation as_bytes(const Operation& operation);

  void append(const std::byte* source, std::byte* target, size_t count);
  DType dtype() const { return dtype_; }
  size_t count() const { return count_; }
  size_t item_bytes() const { return bytes_of(dtype_); }
  const std::vector<Segment>& segments() const { return segments_; }

  // Copies [begin, begin + count) of the sources to `out`, times `scale`; the neutral value of `op` where a source is null.
  void pack(size_t begin, size_t count, ReduceOp op, std::byte* out, double scale = 1.0) const;
  // Copies `in` to [begin, begin + count) of the targets.
  void unpack(size_t begin, size_t count, const std::byte* in) const;

  // visit(segment, first element within the segment, elements, first element within the range)
  template <class Visit>
  void for_each_piece(size_t begin, size_t count, Visit visit) const {
    const size_t end = begin + count;
    auto segment = std::upper_bound(segments_.begin(), segments_.end(), begin,
                                    [](size_t position, const Segment& s) { return position < s.begin + s.count; });
    for (; segment != segments_.end() && segment->begin < end; ++segment) {
      const size_t from = std::max(begin, segment->begin);
      const size_t to = std::min(end, segment->begin + segment->count);
      if (to > from) visit(*segment, from - segment->begin, to - from, from - begin);
    }
  }

 private:
  DType dtype_;
  size_t count_ = 0;
  std::vector<Segment> segments_;
};

}  // namespace horovodish
