#include "planes/nccl/nccl_launch.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "memory/thread_setup.h"

namespace horovodish {

namespace {

// Alignment of tensors in the fusion buffer, as in CUDA's own allocations.
constexpr size_t kAlignment = 256;
// Tensors of this size or more are not packed, so that a group does not make the fusion buffer as large as itself.
constexpr size_t kLarge = 4 << 20;
// The range of numbers that float16 represents with all its digits.
constexpr double kSmallestHalf = 0x1p-14, kLargestHalf = 65504;

}  // namespace

std::string problem_for_nccl(Kind kind, ReduceOp op, const std::vector<DType>& dtypes, double prescale,
                             double postscale, CodecKind codec) {
  // Links between GPUs are not measured, so automatic means no codec here.
  if (codec != CodecKind::none && codec != CodecKind::automatic) return "codes are made in host memory";
  if (kind == Kind::send || kind == Kind::receive) return "sends travel through host memory";
  if (kind != Kind::allreduce && kind != Kind::reducescatter) return {};  // bytes are moved
  if (op == ReduceOp::adasum) return "NCCL has no Adasum";
  const double factor = prescale * postscale;
  const bool scaled = prescale != 1.0 || postscale != 1.0;
  const bool sums = op == ReduceOp::sum || op == ReduceOp::average;
  for (const DType dtype : dtypes) {
    if (only_moves(dtype) || dtype == DType::int16) return "NCCL does not reduce " + std::string(name_of(dtype));
    if (op == ReduceOp::average && !is_floating(dtype)) return "NCCL's average of integers counts joined ranks";
    if (scaled && (!sums || !is_floating(dtype))) return "NCCL scales sums of floating-point numbers only";
    const double size = std::abs(factor);
    if (dtype == DType::float16 && scaled && (size < kSmallestHalf || size > kLargestHalf)) {
      return "NCCL would multiply by a float16, which loses digits of this factor";
    }
  }
  return {};
}

std::string problem_for_nccl(const Request& request) {
  return problem_for_nccl(request.kind, request.op, dtypes_of(request), request.prescale, request.postscale,
                          request.compression.kind);
}

NcclLaunch::NcclLaunch(Operation& operation, const Rows& rows, NcclCommunicator& communicator, Device& device, int own,
                       int ranks)
    : operation_(operation),
      request_(*operation.request),
      rows_(rows),
      communicator_(communicator),
      nccl_(communicator.nccl()),
      device_(device),
      own_(own),
      ranks_(ranks) {
  plan();  // for the size of the scratch memory
  if (reserved_ == 0) return;
  scratch_ = device_.scratch(reserved_);
  plan();
}

void NcclLaunch::plan() {
  reserved_ = 0;
  pieces_.clear();
  before_.clear();
  after_.clear();
  if (request_.kind == Kind::allreduce) plan_allreduce();
  if (request_.by_elements) return plan_elements();
  if (request_.kind == Kind::reducescatter) plan_reducescatter();
  if (request_.kind == Kind::broadcast) plan_broadcast();
}

std::byte* NcclLaunch::reserve(size_t bytes) {
  const size_t begin = reserved_;
  reserved_ += ceil_divide(bytes, kAlignment) * kAlignment;
  return scratch_ == nullptr ? nullptr : scratch_ + begin;
}

void NcclLaunch::plan_allreduce() {
  for (const Concatenation& whole : Concatenation::by_dtype(operation_)) {
    Concatenation small(whole.dtype());
    for (const Concatenation::Tensor& tensor : whole.tensors()) {
      Concatenation alone(whole.dtype());
      const bool is_small = tensor.range.count * whole.item_bytes() < kLarge;
      (is_small ? small : alone).append(tensor.source, tensor.target, tensor.range.count);
      plan_vector(alone);
    }
    plan_vector(small);
  }
}

// Several tensors become one long vector in the fusion buffer. A single tensor needs no buffer.
void NcclLaunch::plan_vector(const Concatenation& whole) {
  if (whole.count() == 0) return;
  const Concatenation::Tensor& first = whole.tensors().front();
  if (whole.tensors().size() == 1 && first.source != nullptr && first.target != nullptr) {
    pieces_.push_back({first.source, first.target, whole.dtype(), first.range.count});
  } else {
    plan_in_buffer(whole, whole.whole(), whole.whole());
  }
}

// Works in place in the fusion buffer. Copies the range `comes` from the tensors to the buffer first, and the range
// `goes` back at the end.
void NcclLaunch::plan_in_buffer(const Concatenation& whole, Range comes, Range goes) {
  const size_t item = whole.item_bytes();
  std::byte* const buffer = reserve(whole.count() * item);
  const auto place = [&](size_t element) { return buffer == nullptr ? nullptr : buffer + element * item; };
  pieces_.push_back({buffer, buffer, whole.dtype(), whole.count()});
  whole.for_each_piece(comes, [&](const Concatenation::Tensor& tensor, size_t first, size_t count, size_t position) {
    std::byte* const target = place(comes.begin + position);
    const std::byte* const source = tensor.source == nullptr ? nullptr : tensor.source + first * item;
    before_.push_back({source, target, whole.dtype(), count});
  });
  whole.for_each_piece(goes, [&](const Concatenation::Tensor& tensor, size_t first, size_t count, size_t position) {
    if (tensor.target == nullptr) return;
    after_.push_back({place(goes.begin + position), tensor.target + first * item, whole.dtype(), count});
  });
}

void NcclLaunch::plan_reducescatter() {
  for (size_t i = 0; i < request_.members.size(); ++i) {
    const Member& member = request_.members[i];
    const auto count = static_cast<size_t>(member.count());
    const std::byte* source = operation_.buffers[i].source;
    std::byte* target = operation_.buffers[i].target;
    if (operation_.buffers[i].source == nullptr && count > 0) {  // this rank has joined
      std::byte* const identity = reserve(count * bytes_of(member.dtype));
      before_.push_back({nullptr, identity, member.dtype, count});
      source = identity;
      target = reserve(count * bytes_of(member.dtype));
    }
    pieces_.push_back({source, target, member.dtype, count});
  }
}

// A reducescatter copies only this rank's part back. An allgather copies only this rank's part in.
void NcclLaunch::plan_elements() {
  const bool gathers = request_.kind == Kind::allgather;
  for (const Concatenation& whole : Concatenation::by_dtype(operation_)) {
    const Range own = part_of(request_, whole.count(), static_cast<size_t>(own_), static_cast<size_t>(ranks_));
    plan_in_buffer(whole, gathers ? own : whole.whole(), gathers ? whole.whole() : own);
  }
}

void NcclLaunch::plan_broadcast() {
  for (size_t i = 0; i < request_.members.size(); ++i) {
    const Member& member = request_.members[i];
    const size_t bytes = static_cast<size_t>(member.count()) * bytes_of(member.dtype);
    if (bytes == 0) continue;
    std::byte* const target = operation_.buffers[i].target;
    pieces_.push_back({operation_.buffers[i].source, target == nullptr ? reserve(bytes) : target, DType::uint8, bytes});
  }
}

void NcclLaunch::pack() {
  copy(before_);
  if (!request_.any_rows()) return;
  for (size_t member = 0; member < request_.members.size(); ++member) {
    std::vector<int64_t> incoming;
    for (size_t from = 0; from < rows_.size(); ++from)
      incoming.push_back(rows(member, from, static_cast<size_t>(own_)));
    const size_t bytes = row_bytes(request_.members[member]) *
                         static_cast<size_t>(std::accumulate(incoming.begin(), incoming.end(), int64_t{0}));
    operation_.handle->outputs.push_back({nullptr, bytes, incoming, device_.allocate(bytes, device_.stream())});
  }
}

void NcclLaunch::copy(const std::vector<Piece>& pieces) const {
  std::vector<DeviceCopy> copies;
  for (const Piece& piece : pieces) {
    if (piece.source == nullptr) {
      device_.fill_identity(piece.dtype, request_.op, piece.target, piece.count);
    } else {
      copies.push_back({piece.target, piece.source, piece.count * bytes_of(piece.dtype)});
    }
  }
  device_.copy(copies, device_.stream());
}

int64_t NcclLaunch::rows(size_t member, size_t from, size_t to) const {
  return rows_[from][request_.kind == Kind::alltoall ? member * rows_.size() + to : member];
}

void NcclLaunch::call() {
  // Made before the group: within a group, NCCL takes no other calls.
  std::vector<abi::NcclOp> ops;
  if (request_.kind == Kind::allreduce || request_.kind == Kind::reducescatter) {
    for (const Piece& piece : pieces_) ops.push_back(op_for(piece.dtype));
  }
  check(nccl_.group_start());
  try {
    call_all(ops);
  } catch (...) {  // an open group would swallow the calls of other communicators
    nccl_.group_end();
    throw;
  }
  const NewThreadsAnywhere cores;
  check(nccl_.group_end());
}

void NcclLaunch::call_all(const std::vector<abi::NcclOp>& ops) {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (request_.by_elements) {
      call_by_elements(piece, ops.empty() ? abi::NcclOp::sum : ops[i]);
    } else if (request_.kind == Kind::broadcast) {
      ask(nccl_.broadcast, piece.source, piece.target, piece.count, abi::NcclType::uint8, operation_.root);
    } else if (request_.kind == Kind::reducescatter) {
      call_reducescatter(piece, request_.members[i], ops[i]);
    } else {
      ask(nccl_.all_reduce, piece.source, piece.target, piece.count, nccl_type(piece.dtype), ops[i]);
    }
  }
  for (size_t member = 0; request_.any_rows() && member < request_.members.size(); ++member) {
    if (request_.kind == Kind::allgather) {
      call_allgather(member);
    } else {
      call_alltoall(member);
    }
  }
}

void NcclLaunch::unpack() {
  communicator_.forget_factors();
  copy(after_);
}

// Factors and the average become one multiplication of each contribution before the sum. A joined rank contributes the
// identity, and does not count for an average.
abi::NcclOp NcclLaunch::op_for(DType dtype) {
  switch (request_.op) {
    case ReduceOp::min:
      return abi::NcclOp::min;
    case ReduceOp::max:
      return abi::NcclOp::max;
    case ReduceOp::product:
      return abi::NcclOp::product;
    default:
      break;
  }
  const bool average = request_.op == ReduceOp::average;
  const double factor = request_.prescale * request_.postscale;
  if (factor == 1.0 && !average) return abi::NcclOp::sum;
  if (factor == 1.0 && !operation_.any_joined) return abi::NcclOp::average;
  return communicator_.sum_of_multiples(dtype, average ? factor / std::max(operation_.contributors, 1) : factor);
}

void NcclLaunch::call_reducescatter(const Piece& piece, const Member& member, abi::NcclOp op) {
  if (piece.count == 0) return;
  const auto rows = static_cast<size_t>(member.shape[0]);
  reduce_parts(piece, piece.target, op, [&, row = piece.count / rows](size_t rank) {
    const Range part = rows_of(rows, rank, static_cast<size_t>(ranks_));
    return Range{part.begin * row, part.count * row};
  });
}

void NcclLaunch::call_by_elements(const Piece& piece, abi::NcclOp op) {
  const auto part = [&](size_t rank) { return part_of(request_, piece.count, rank, static_cast<size_t>(ranks_)); };
  const size_t item = bytes_of(piece.dtype);
  std::byte* const own = piece.target + part(static_cast<size_t>(own_)).begin * item;
  if (piece.count == 0) return;
  if (request_.kind == Kind::allgather) {
    gather_parts(own, piece.target, [&](size_t rank) { return part(rank).count * item; });
  } else {
    reduce_parts(piece, own, op, part);
  }
}

void NcclLaunch::call_allgather(size_t member) {
  const Handle::Output& output = operation_.handle->outputs[member];
  if (output.bytes == 0) return;
  gather_parts(operation_.buffers[member].source, output.on_device->data(),
               [&, row = row_bytes(request_.members[member])](size_t rank) {
                 return static_cast<size_t>(output.rows[rank]) * row;
               });
}

template <class SizeOf>
bool NcclLaunch::all_equal(SizeOf size_of_rank) const {
  bool equal = true;
  for (size_t rank = 1; rank < static_cast<size_t>(ranks_); ++rank) equal &= size_of_rank(rank) == size_of_rank(0);
  return equal;
}

// NCCL scatters only equal parts. Unequal parts are each reduced to their rank.
template <class PartOf>
void NcclLaunch::reduce_parts(const Piece& piece, std::byte* own, abi::NcclOp op, PartOf part_of) {
  const abi::NcclType type = nccl_type(piece.dtype);
  if (all_equal([&](size_t rank) { return part_of(rank).count; })) {
    return ask(nccl_.reduce_scatter, piece.source, own, part_of(0).count, type, op);
  }
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto [begin, count] = part_of(static_cast<size_t>(rank));
    const std::byte* const source = piece.source + begin * bytes_of(piece.dtype);
    if (count > 0) ask(nccl_.reduce, source, rank == own_ ? own : nullptr, count, type, op, rank);
  }
}

// NCCL gathers only equal parts. Unequal parts are each broadcast by their rank.
template <class BytesOf>
void NcclLaunch::gather_parts(const std::byte* own, std::byte* target, BytesOf bytes_of_rank) {
  if (all_equal(bytes_of_rank)) return ask(nccl_.all_gather, own, target, bytes_of_rank(0), abi::NcclType::uint8);
  for (int rank = 0; rank < ranks_; ++rank) {
    const size_t bytes = bytes_of_rank(static_cast<size_t>(rank));
    if (bytes > 0) ask(nccl_.broadcast, rank == own_ ? own : target, target, bytes, abi::NcclType::uint8, rank);
    target += bytes;
  }
}

void NcclLaunch::call_alltoall(size_t member) {
  const Handle::Output& output = operation_.handle->outputs[member];
  const size_t row = row_bytes(request_.members[member]);
  const auto bytes = [&](int from, int to) {
    return static_cast<size_t>(rows(member, static_cast<size_t>(from), static_cast<size_t>(to))) * row;
  };
  const std::byte* source = operation_.buffers[member].source;
  std::byte* target = output.on_device->data();
  for (int peer = 0; peer < ranks_; ++peer) {
    const size_t to_peer = bytes(own_, peer), from_peer = bytes(peer, own_);
    if (to_peer > 0) ask(nccl_.send, source, to_peer, abi::NcclType::uint8, peer);
    if (from_peer > 0) ask(nccl_.receive, target, from_peer, abi::NcclType::uint8, peer);
    source += to_peer;
    target += from_peer;
  }
}

}  // namespace horovodish
