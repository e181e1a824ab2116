// Fusion: the tensors of a bucket as one long vector. No memory holds the vector. A plane asks for ranges of the
// concatenation and gets the pieces of tensors in them, so it packs straight from the tensors into cache-sized chunks,
// and unpacks straight back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "arithmetic/types.h"
#include "operation/operation.h"
#include "planes/shards.h"

namespace horovodish {

// The dtypes of a request's members, in the order of first appearance.
std::vector<DType> dtypes_of(const Request& request);

class Concatenation {
 public:
  struct Tensor {
    const std::byte* source;  // null: the identity of the op
    std::byte* target;        // null: the result is not wanted
    Range range;              // of the concatenation
    float* errors;            // for the errors and the next fields see Buffer
    bool errors_move;
    CodeFigures* figures;
  };

  explicit Concatenation(DType dtype) : dtype_(dtype) {}

  // The members of an allreduce, one concatenation per dtype in the order of first appearance.
  static std::vector<Concatenation> by_dtype(const Operation& operation);
  // All members as bytes, for collectives that only move data.
  static Concatenation as_bytes(const Operation& operation);

  void append(const std::byte* source, std::byte* target, size_t count, float* errors = nullptr,
              bool errors_move = false, CodeFigures* figures = nullptr);
  DType dtype() const { return dtype_; }
  size_t count() const { return count_; }
  size_t item_bytes() const { return bytes_of(dtype_); }
  Range whole() const { return {0, count_}; }
  const std::vector<Tensor>& tensors() const { return tensors_; }
  size_t index_of(const Tensor& tensor) const { return static_cast<size_t>(&tensor - tensors_.data()); }

  // Copies this range of the sources to `out`, times `scale`. A null source gives the identity of `op`.
  void pack(Range range, ReduceOp op, std::byte* out, double scale = 1.0) const;
  // Copies `in` to this range of the targets.
  void unpack(Range range, const std::byte* in) const;
  // Copies this range of the sources to the targets.
  void move(Range range) const;

  // visit(tensor, first element within the tensor, elements, first element within the range)
  template <class Visit>
  void for_each_piece(Range range, Visit visit) const {
    auto tensor = std::upper_bound(tensors_.begin(), tensors_.end(), range.begin,
                                   [](size_t position, const Tensor& its) { return position < its.range.end(); });
    for (; tensor != tensors_.end() && tensor->range.begin < range.end(); ++tensor) {
      const size_t from = std::max(range.begin, tensor->range.begin);
      const size_t to = std::min(range.end(), tensor->range.end());
      if (to > from) visit(*tensor, from - tensor->range.begin, to - from, from - range.begin);
    }
  }

 private:
  DType dtype_;
  size_t count_ = 0;
  std::vector<Tensor> tensors_;
};

// The members of a reducescatter, laid out so that each rank's part is contiguous.
struct ScatterLayout {
  Concatenation concatenation;  // only the part of this rank has targets
  std::vector<size_t> begins;   // by rank: where its part begins; last: the end
};
// One per dtype; `own` is this rank's index among `ranks`.
std::vector<ScatterLayout> scatter_layouts(const Operation& operation, size_t own, size_t ranks);

}  // namespace horovodish
