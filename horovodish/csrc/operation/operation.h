// A collective on this rank, from its submission to its end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "arithmetic/reduce.h"
#include "memory/clock.h"
#include "negotiation/mask.h"
#include "negotiation/request.h"
#include "operation/handle.h"
#include "operation/range.h"
#include "timeline/timeline.h"

namespace horovodish {

// Counts what this rank encodes of one tensor. Tensors that are encoded together share bytes and time in proportion to
// their lengths.
struct CodeFigures {
  uint64_t steps = 0;
  double value_bytes = 0, code_bytes = 0;  // sent by this rank to other hosts, before encoding and after
  double encode_seconds = 0, decode_seconds = 0;
  // Sums of squares in the last step that measured them: of this rank's values, and of the errors that it keeps or
  // drops.
  double gradient_squares = 0, error_squares = 0;

  // Norms cost a pass over the values, so not every step measures them.
  static constexpr uint64_t kStepsPerNorm = 100;
  bool measures_norms() const { return steps % kStepsPerNorm == 1; }
};

// The memory of one member. Null pointers stand for a rank that has joined: it contributes the identity of the op, or no
// rows, and wants no result. The plane allocates the outputs of an allgather and of an alltoall.
struct Buffer {
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  // Of an allgather: how many rows this rank contributes. Of an alltoall: how many rows it sends to each rank.
  std::vector<int64_t> rows = {};
  // An error for each element: what this rank's codes of the tensor have left out so far. Null if no errors are kept.
  std::shared_ptr<float> errors = nullptr;
  // True if another rank of the host may have to encode elements whose errors this rank has.
  bool errors_move = false;
  std::shared_ptr<CodeFigures> figures = nullptr;  // null where nothing is encoded
};

// Called once with the settled handle.
using Then = std::function<void(const std::shared_ptr<Handle>&)>;

struct Operation {
  int process_set = 0;
  std::shared_ptr<const Request> request;
  std::shared_ptr<const std::string> signature;
  std::vector<Buffer> buffers;  // one per member
  // Owns the memory of the buffers. The engine releases it before it settles the handle. A plane that needs the memory
  // for longer keeps a share. The destructor may run on the engine's thread, so it must not wait.
  std::shared_ptr<void> memory;
  Mask absent;  // members that this rank has no value for; once decided: that no rank has a value for
  uint64_t decision = 0;  // known once decided: its number in the order of decisions
  int contributors = 0;  // known once decided: the divisor of an average
  bool any_joined = false;  // known once decided
  CodecKind codec = CodecKind::none;  // known once decided: the codec of its values between hosts
  uint64_t code_seed = 0;  // for codecs that draw random numbers
  int root = 0;  // known once decided: index of the root within the process set
  std::shared_ptr<Handle> handle;
  std::vector<std::shared_ptr<DeviceEvent>> ready;  // when the inputs are ready, on streams of the framework
  std::shared_ptr<DeviceEvent> done;  // on a device, once launched: when the operation is complete
  std::function<void()> inner;  // for an operation that a plane makes itself: called instead of settling its handle
  Then then;  // called on a completion thread; may be empty
  bool in_program = false;  // a framework's program has submitted it, so the script may go on without its result
  Clock::time_point since{};  // when it was stated to the other ranks
  std::shared_ptr<Operation> next;  // in the queue of operations whose `then` is to be called
  Trace trace;

  void trace_submission(Clock::time_point now) { trace.submitted(request, signature, process_set, in_program, now); }

  // A joined rank contributes the identity, which must not be scaled. So if a rank has joined, every other rank scales
  // its own contribution when it packs it. Otherwise the reduction scales in passing.
  double packing_scale() const { return any_joined ? request->prescale : 1.0; }
  Scaling scaling() const {
    const bool average = request->op == ReduceOp::average;
    return {any_joined ? 1.0 : request->prescale, request->postscale, average ? std::max(contributors, 1) : 1};
  }
};

// Makes the operation that a caller hands over. `signature`: the request's, if it is known already.
inline std::shared_ptr<Operation> operation_of(std::shared_ptr<const Request> request, std::vector<Buffer> buffers,
                                               int process_set, std::shared_ptr<Handle> handle,
                                               std::shared_ptr<const std::string> signature = nullptr) {
  if (!signature) signature = std::make_shared<const std::string>(request->signature());
  auto operation = std::make_shared<Operation>();
  operation->process_set = process_set;
  operation->request = std::move(request);
  operation->signature = std::move(signature);
  operation->buffers = std::move(buffers);
  operation->handle = std::move(handle);
  return operation;
}

// Adds a tensor to a request and to its buffers.
inline void add_member(Request& request, std::vector<Buffer>& buffers, Member member, Buffer buffer) {
  if (request.any_rows()) {
    const int64_t rows = std::exchange(member.shape.at(0), Member::kAnyLength);
    if (request.kind == Kind::allgather) buffer.rows = {rows};
  }
  request.members.push_back(std::move(member));
  buffers.push_back(std::move(buffer));
}
// The elements of `count` that rank `index` of `ranks` gets, in an operation whose parts are elements.
inline Range part_of(const Request& request, size_t count, size_t index, size_t ranks) {
  if (request.ends.empty()) return elements_of(count, index, ranks);
  const auto end = [&](size_t i) { return static_cast<size_t>(request.ends.at(i)); };
  const size_t begin = index == 0 ? 0 : end(index - 1);
  return {begin, end(index) - begin};
}

// The name in messages of a tensor that the caller has not named.
inline std::string member_name(const std::string& name, size_t index, size_t members) {
  return members == 1 ? name : name + "[" + std::to_string(index) + "]";
}

// An operation that tells the other ranks why this rank cannot take part.
inline std::shared_ptr<Operation> refusal_of(Kind kind, const std::string& name, int process_set, std::string why,
                                             Family family = {}) {
  auto request = std::make_shared<Request>();
  request->family = std::move(family);
  request->kind = kind;
  request->name = name;
  request->refusal = std::move(why);
  return operation_of(std::move(request), {}, process_set, std::make_shared<Handle>(0));
}

// In errors: receive of 'activations' from rank 2 with tag 5, or receive from any rank with tag 5.
inline std::string transfer_text(const Request& request) {
  const std::string peer = request.root == Request::kAnyRank ? "any rank" : text_of(request.root);
  return std::string(name_of(request.kind)) + (is_unnamed(request.name) ? "" : " of '" + request.name + "'") +
         (request.kind == Kind::send ? " to " : " from ") + peer + " with tag " + std::to_string(request.tag);
}

// In errors: allreduce of 'layer.weight' and 3 more, or allreduce 'loss', or call 2 of allreduce where the caller has given no
// name.
inline std::string subject_of(const Request& request) {
  if (request.is_transfer()) return transfer_text(request);
  const std::string label = label_of(request);
  if (label[0] != '\'') return label;
  return std::string(name_of(request.kind)) + (tensor_for(request).empty() ? " " : " of ") + label;
}
inline constexpr const char* kNameInUse =
    "an operation of that name has not completed yet. Remedy: synchronize it first, or give the two operations "
    "different names.";

// Adds the next member's output to the handle, once it is known how many rows come from every rank.
inline Handle::Output& allocate_rows(Operation& operation, size_t member, const std::vector<int64_t>& rows_by_rank) {
  const int64_t rows = std::accumulate(rows_by_rank.begin(), rows_by_rank.end(), int64_t{0});
  const size_t bytes = row_bytes(operation.request->members[member]) * static_cast<size_t>(rows);
  auto& outputs = operation.handle->outputs;
  outputs.push_back({std::make_unique_for_overwrite<std::byte[]>(bytes), bytes, rows_by_rank});
  return outputs.back();
}

}  // namespace horovodish
