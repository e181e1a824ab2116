#include "planes/fusion.h"

#include "arithmetic/copy_bytes.h"
#include "arithmetic/reduce.h"

namespace horovodish {

std::vector<DType> dtypes_of(const Request& request) {
  std::vector<DType> dtypes;
  for (const Member& member : request.members) {
    if (std::find(dtypes.begin(), dtypes.end(), member.dtype) == dtypes.end()) dtypes.push_back(member.dtype);
  }
  return dtypes;
}

std::vector<Concatenation> Concatenation::by_dtype(const Operation& operation) {
  std::vector<Concatenation> result;
  const auto& members = operation.request->members;
  for (const DType dtype : dtypes_of(*operation.request)) {
    Concatenation& concatenation = result.emplace_back(dtype);
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i].dtype != dtype) continue;
      const Buffer& its = operation.buffers[i];
      concatenation.append(its.source, its.target, static_cast<size_t>(members[i].count()), its.errors.get(),
                           its.errors_move, its.figures.get());
    }
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

std::vector<ScatterLayout> scatter_layouts(const Operation& operation, size_t own, size_t ranks) {
  std::vector<ScatterLayout> result;
  const auto& members = operation.request->members;
  if (operation.request->by_elements) {
    for (const Concatenation& whole : Concatenation::by_dtype(operation)) {
      ScatterLayout& all = result.emplace_back(Concatenation(whole.dtype()), std::vector<size_t>{0});
      for (size_t rank = 0; rank < ranks; ++rank) {
        const Range part = part_of(*operation.request, whole.count(), rank, ranks);
        whole.for_each_piece(part, [&](const Concatenation::Tensor& tensor, size_t first, size_t count, size_t) {
          const size_t begin = first * whole.item_bytes();
          all.concatenation.append(tensor.source == nullptr ? nullptr : tensor.source + begin,
                                   rank != own || tensor.target == nullptr ? nullptr : tensor.target + begin, count);
        });
        all.begins.push_back(part.end());
      }
    }
    return result;
  }
  for (const DType dtype : dtypes_of(*operation.request)) {
    ScatterLayout& all = result.emplace_back(Concatenation(dtype), std::vector<size_t>{0});
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (size_t i = 0; i < members.size(); ++i) {
        if (members[i].dtype != dtype || members[i].count() == 0) continue;
        const auto rows = static_cast<size_t>(members[i].shape[0]);
        const size_t row = static_cast<size_t>(members[i].count()) / rows;
        const Range part = rows_of(rows, rank, ranks);
        const Buffer& buffer = operation.buffers[i];
        const std::byte* source = buffer.source;
        if (source != nullptr) source += part.begin * row * bytes_of(dtype);
        all.concatenation.append(source, rank == own ? buffer.target : nullptr, part.count * row);
      }
      all.begins.push_back(all.concatenation.count());
    }
  }
  return result;
}

void Concatenation::append(const std::byte* source, std::byte* target, size_t count, float* errors, bool errors_move,
                           CodeFigures* figures) {
  if (count == 0) return;
  tensors_.push_back({source, target, {count_, count}, errors, errors_move, figures});
  count_ += count;
}

void Concatenation::pack(Range range, ReduceOp op, std::byte* out, double scale) const {
  const size_t item = item_bytes();
  for_each_piece(range, [&](const Tensor& tensor, size_t first, size_t length, size_t position) {
    if (tensor.source == nullptr) {
      fill_identity(dtype_, op, out + position * item, length);
    } else if (scale != 1.0) {
      const void* source = tensor.source + first * item;
      reduce(dtype_, op, out + position * item, &source, 1, length, {.prescale = scale});
    } else {
      copy_bytes(out + position * item, tensor.source + first * item, length * item);
    }
  });
}

void Concatenation::unpack(Range range, const std::byte* in) const {
  const size_t item = item_bytes();
  for_each_piece(range, [&](const Tensor& tensor, size_t first, size_t length, size_t position) {
    if (tensor.target != nullptr) copy_bytes(tensor.target + first * item, in + position * item, length * item);
  });
}

void Concatenation::move(Range range) const {
  const size_t item = item_bytes();
  for_each_piece(range, [&](const Tensor& tensor, size_t first, size_t length, size_t) {
    if (tensor.target == nullptr || tensor.target == tensor.source) return;
    copy_bytes(tensor.target + first * item, tensor.source + first * item, length * item);
  });
}

}  // namespace horovodish
