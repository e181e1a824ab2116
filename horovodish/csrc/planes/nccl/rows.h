// Allgather and alltoall: how many rows go from whom to whom. No rank knows that before all have told each other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "operation/operation.h"

namespace horovodish {

class RowTable {
 public:
  // Knows what this rank sends, index `own` of `ranks`.
  RowTable(const Operation& operation, size_t own, size_t ranks)
      : own_(own), ranks_(ranks), to_each_(operation.request->kind == Kind::alltoall) {
    line_ = operation.buffers.size() * (to_each_ ? ranks : 1);
    numbers_.resize(line_ * ranks);
    int64_t* number = line(own);
    for (const Buffer& buffer : operation.buffers) number = std::copy(buffer.rows.begin(), buffer.rows.end(), number);
  }

  // What a rank tells the others: `line_length()` numbers. Those of all ranks lie one after the other.
  size_t line_length() const { return line_; }
  size_t line_bytes() const { return line_ * sizeof(int64_t); }
  int64_t* line(size_t rank) { return numbers_.data() + rank * line_; }

  // The rest once every line is there. Rows of a member that one rank sends to another.
  int64_t between(size_t member, size_t from, size_t to) const {
    return numbers_[from * line_ + (to_each_ ? member * ranks_ + to : member)];
  }
  // Rows of a member that this rank gets, by the rank that sends them.
  std::vector<int64_t> incoming(size_t member) const {
    std::vector<int64_t> rows(ranks_);
    for (size_t from = 0; from < ranks_; ++from) rows[from] = between(member, from, own_);
    return rows;
  }

 private:
  const size_t own_, ranks_;
  const bool to_each_;  // each rank gets rows of its own; otherwise all get the same ones
  size_t line_;
  std::vector<int64_t> numbers_;
};

}  // namespace horovodish
