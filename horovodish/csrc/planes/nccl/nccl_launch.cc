#include "planes/nccl/nccl_launch.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "memory/thread_setup.h"

namespace horovodish {

namespace {

// Where tensors begin in the fusion buffer, as CUDA's own allocations do.
constexpr size_t kAlignment = 256;
// Tensors from this size on travel where they are, so that no group makes the fusion buffer as large as itself.
constexpr size_t kLarge = 4 << 20;
// Numbers that float16 has with all its digits.
constexpr double kSmallestHalf = 0x1p-14, kLargestHalf = 65504;

bool is_floating(DType dtype) {
  return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float32 || dtype == DType::float64;
}

}  // namespace

std::string problem_for_nccl(Kind kind, ReduceOp op, const std::vector<DType>& dtypes, double prescale,
                             double postscale) {
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
  return problem_for_nccl(request.kind, request.op, dtypes_of(request), request.prescale, request.postscale);
}

bool is_scaled(const Request& request) {
  const bool reduces = request.kind == Kind::allreduce || request.kind == Kind::reducescatter;
  return reduces && (request.prescale != 1.0 || request.postscale != 1.0);
}

NcclLaunch::NcclLaunch(Operation& operation, const std::optional<RowTable>& rows, NcclCommunicator& communicator,
                       Device& device, int own, int ranks)
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
  identities_.clear();
  before_.clear();
  after_.clear();
  if (request_.kind == Kind::allreduce) plan_allreduce();
  if (request_.by_elements) return plan_elements();
  if (request_.kind == Kind::reducescatter) plan_reducescatter();
  if (request_.kind == Kind::broadcast) plan_broadcast();
}

std::byte* NcclLaunch::reserve(size_t bytes) {
  const size_t begin = reserved_;
  reserved_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return scratch_ == nullptr ? nullptr : scratch_ + begin;
}

void NcclLaunch::plan_allreduce() {
  for (const Concatenation& whole : Concatenation::by_dtype(operation_)) {
    std::vector<Concatenation::Tensor> small;
    for (const auto& tensor : whole.tensors()) {
      if (tensor.range.count * whole.item_bytes() < kLarge) {
        small.push_back(tensor);
      } else {
        plan_vector(whole.dtype(), {tensor});
      }
    }
    plan_vector(whole.dtype(), small);
  }
}

// Several tensors become one long vector in the fusion buffer. One alone needs none.
void NcclLaunch::plan_vector(DType dtype, const std::vector<Concatenation::Tensor>& tensors) {
  if (tensors.empty()) return;
  const auto& first = tensors[0];
  if (tensors.size() == 1 && first.source != nullptr && first.target != nullptr) {
    pieces_.push_back({first.source, first.target, dtype, first.range.count});
    return;
  }
  size_t total = 0;
  for (const auto& tensor : tensors) total += tensor.range.count;
  std::byte* const buffer = reserve(total * bytes_of(dtype));
  pieces_.push_back({buffer, buffer, dtype, total});
  size_t begin = 0;
  for (const auto& tensor : tensors) {
    std::byte* const place = buffer == nullptr ? nullptr : buffer + begin;
    const size_t bytes = tensor.range.count * bytes_of(dtype);
    begin += bytes;
    if (tensor.source == nullptr) {
      identities_.push_back({place, dtype, tensor.range.count});
    } else {
      before_.push_back({place, tensor.source, bytes});
    }
    if (tensor.target != nullptr) after_.push_back({tensor.target, place, bytes});
  }
}

void NcclLaunch::plan_reducescatter() {
  for (size_t i = 0; i < request_.members.size(); ++i) {
    const Member& member = request_.members[i];
    const auto count = static_cast<size_t>(member.count());
    const std::byte* source = operation_.buffers[i].source;
    std::byte* target = operation_.buffers[i].target;
    if (operation_.buffers[i].source == nullptr && count > 0) {  // this rank has joined
      std::byte* const identity = reserve(count * bytes_of(member.dtype));
      identities_.push_back({identity, member.dtype, count});
      source = identity;
      target = reserve(count * bytes_of(member.dtype));
    }
    pieces_.push_back({source, target, member.dtype, count});
  }
}

// In the fusion buffer, in place. Of a reducescatter, only the own part goes back; of an allgather, only that one comes.
void NcclLaunch::plan_elements() {
  const bool gathers = request_.kind == Kind::allgather;
  for (const Concatenation& whole : Concatenation::by_dtype(operation_)) {
    const size_t item = whole.item_bytes();
    const Range own = elements_of(whole.count(), static_cast<size_t>(own_), static_cast<size_t>(ranks_));
    std::byte* const buffer = reserve(whole.count() * item);
    pieces_.push_back({buffer, buffer, whole.dtype(), whole.count()});
    const auto visit = [&](Range range, bool comes) {
      whole.for_each_piece(
          range, [&](const Concatenation::Tensor& tensor, size_t first, size_t count, size_t position) {
            std::byte* const place = buffer == nullptr ? nullptr : buffer + (range.begin + position) * item;
            if (comes && tensor.source == nullptr) {
              identities_.push_back({place, whole.dtype(), count});
            } else if (comes) {
              before_.push_back({place, tensor.source + first * item, count * item});
            } else if (tensor.target != nullptr) {
              after_.push_back({tensor.target + first * item, place, count * item});
            }
          });
    };
    visit(gathers ? own : whole.whole(), true);
    visit(gathers ? whole.whole() : own, false);
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
  for (const Identity& identity : identities_) {
    device_.fill_identity(identity.dtype, request_.op, identity.target, identity.count);
  }
  for (const DeviceCopy& copy : before_) device_.copy(copy.target, copy.source, copy.bytes);
  if (!request_.any_rows()) return;
  for (size_t member = 0; member < request_.members.size(); ++member) {
    const std::vector<int64_t> rows = rows_->incoming(member);
    const size_t bytes = row_bytes(request_.members[member]) *
                         static_cast<size_t>(std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    operation_.handle->outputs.push_back({nullptr, bytes, rows, device_.allocate(bytes)});
  }
}

void NcclLaunch::call() {
  // Made before the group: NCCL takes no other calls within one.
  std::vector<abi::NcclOp> ops;
  if (request_.kind == Kind::allreduce || request_.kind == Kind::reducescatter) {
    for (const Piece& piece : pieces_) ops.push_back(op_for(piece.dtype));
  }
  // A group that was left open by an error would swallow the calls of other communicators.
  struct Group {
    const abi::Nccl& nccl;
    bool open = true;
    ~Group() {
      if (open) nccl.group_end();
    }
  };
  check(nccl_.group_start());
  Group group{nccl_};
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    if (request_.by_elements) {
      call_by_elements(piece, ops.empty() ? abi::NcclOp::sum : ops[i]);
    } else if (request_.kind == Kind::broadcast) {
      check(nccl_.broadcast(piece.source, piece.target, piece.count, abi::NcclType::uint8, operation_.root,
                            communicator_.get(), device_.stream()));
    } else if (request_.kind == Kind::reducescatter) {
      call_reducescatter(piece, request_.members[i], ops[i]);
    } else {
      check(nccl_.all_reduce(piece.source, piece.target, piece.count, nccl_type(piece.dtype), ops[i],
                             communicator_.get(), device_.stream()));
    }
  }
  for (size_t member = 0; request_.any_rows() && member < request_.members.size(); ++member) {
    if (request_.kind == Kind::allgather) {
      call_allgather(member);
    } else {
      call_alltoall(member);
    }
  }
  group.open = false;
  const NewThreadsAnywhere cores;
  check(nccl_.group_end());
}

void NcclLaunch::unpack() {
  communicator_.forget_factors();
  for (const DeviceCopy& copy : after_) device_.copy(copy.target, copy.source, copy.bytes);
}

// Factors and the average are one multiplication of each contribution before it is added. A rank that has joined
// contributes the identity, and does not count for an average.
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

// NCCL deals out equal parts only. Where the rows cannot be, each part is reduced to its rank.
void NcclLaunch::call_reducescatter(const Piece& piece, const Member& member, abi::NcclOp op) {
  if (piece.count == 0) return;
  const auto rows = static_cast<size_t>(member.shape[0]), ranks = static_cast<size_t>(ranks_);
  const size_t row = piece.count / rows;
  if (rows % ranks == 0) {
    check(nccl_.reduce_scatter(piece.source, piece.target, piece.count / ranks, nccl_type(piece.dtype), op,
                               communicator_.get(), device_.stream()));
    return;
  }
  for (int rank = 0; rank < ranks_; ++rank) {
    const Range part = rows_of(rows, static_cast<size_t>(rank), ranks);
    if (part.count == 0) continue;
    const size_t begin = part.begin * row * bytes_of(piece.dtype);
    check(nccl_.reduce(piece.source + begin, rank == own_ ? piece.target : nullptr, part.count * row,
                       nccl_type(piece.dtype), op, rank, communicator_.get(), device_.stream()));
  }
}

void NcclLaunch::call_by_elements(const Piece& piece, abi::NcclOp op) {
  const bool gathers = request_.kind == Kind::allgather;
  const auto ranks = static_cast<size_t>(ranks_);
  const size_t item = bytes_of(piece.dtype);
  const auto part = [&](int rank) { return elements_of(piece.count, static_cast<size_t>(rank), ranks); };
  std::byte* const own = piece.target + part(own_).begin * item;
  if (piece.count == 0) return;
  if (piece.count % ranks == 0 && gathers) {
    check(nccl_.all_gather(own, piece.target, piece.count / ranks * item, abi::NcclType::uint8, communicator_.get(),
                           device_.stream()));
    return;
  }
  if (piece.count % ranks == 0) {
    check(nccl_.reduce_scatter(piece.source, own, piece.count / ranks, nccl_type(piece.dtype), op, communicator_.get(),
                               device_.stream()));
    return;
  }
  for (int rank = 0; rank < ranks_; ++rank) {
    const auto [begin, count] = part(rank);
    std::byte* const place = piece.target + begin * item;
    if (count == 0) continue;
    if (gathers) {
      check(nccl_.broadcast(place, place, count * item, abi::NcclType::uint8, rank, communicator_.get(),
                            device_.stream()));
    } else {
      check(nccl_.reduce(place, place, count, nccl_type(piece.dtype), op, rank, communicator_.get(), device_.stream()));
    }
  }
}

// NCCL gathers equal parts only. Where they are not, each is sent to all by its rank.
void NcclLaunch::call_allgather(size_t member) {
  const Handle::Output& output = operation_.handle->outputs[member];
  const size_t row = row_bytes(request_.members[member]);
  const std::byte* const source = operation_.buffers[member].source;
  if (output.bytes == 0) return;
  const bool equal =
      std::adjacent_find(output.rows.begin(), output.rows.end(), std::not_equal_to<>()) == output.rows.end();
  if (equal) {
    check(nccl_.all_gather(source, output.on_device->data(), output.bytes / static_cast<size_t>(ranks_),
                           abi::NcclType::uint8, communicator_.get(), device_.stream()));
    return;
  }
  size_t begin = 0;
  for (int rank = 0; rank < ranks_; ++rank) {
    const size_t bytes = static_cast<size_t>(output.rows[static_cast<size_t>(rank)]) * row;
    std::byte* const place = output.on_device->data() + begin;
    begin += bytes;
    if (bytes == 0) continue;
    check(nccl_.broadcast(rank == own_ ? source : place, place, bytes, abi::NcclType::uint8, rank, communicator_.get(),
                          device_.stream()));
  }
}

void NcclLaunch::call_alltoall(size_t member) {
  const Handle::Output& output = operation_.handle->outputs[member];
  const size_t row = row_bytes(request_.members[member]);
  const auto bytes = [&](int from, int to) {
    return static_cast<size_t>(rows_->between(member, static_cast<size_t>(from), static_cast<size_t>(to))) * row;
  };
  size_t sent = 0, received = 0;
  for (int peer = 0; peer < ranks_; ++peer) {
    const size_t to_peer = bytes(own_, peer), from_peer = bytes(peer, own_);
    if (to_peer > 0) {
      check(nccl_.send(operation_.buffers[member].source + sent, to_peer, abi::NcclType::uint8, peer,
                       communicator_.get(), device_.stream()));
    }
    if (from_peer > 0) {
      check(nccl_.receive(output.on_device->data() + received, from_peer, abi::NcclType::uint8, peer,
                          communicator_.get(), device_.stream()));
    }
    sent += to_peer;
    received += from_peer;
  }
}

}  // namespace horovodish
