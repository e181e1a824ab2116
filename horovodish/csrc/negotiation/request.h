// A rank's request: one collective over one tensor, or over the tensors of a bucket that are negotiated as a unit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "arithmetic/codecs/codec.h"
#include "arithmetic/types.h"
#include "negotiation/rank_set.h"
#include "negotiation/wire.h"

namespace horovodish {

template <>
inline constexpr uint64_t kEnumerators<Kind> = kKindNames.size();
template <>
inline constexpr uint64_t kEnumerators<ReduceOp> = kReduceOpNames.size();
template <>
inline constexpr uint64_t kEnumerators<DType> = kDTypeNames.size();
template <>
inline constexpr uint64_t kEnumerators<CodecKind> = kCodecNames.size();

struct Member {
  std::string name;
  DType dtype = DType::float32;
  // An allgather's first dimension may differ by rank: it is kAnyLength here and travels with the data.
  std::vector<int64_t> shape;
  std::string label = {};  // replaces the name in messages of this rank; the ranks need not agree on it

  static auto fields(auto& its) { return std::tie(its.name, its.dtype, its.shape); }

  static constexpr int64_t kAnyLength = -1;
  // Number of elements; of an allgather, elements per row.
  int64_t count() const;
};

// `text`: the name, and, if there is a label, a tab and the label.
Member member_of(std::string_view text, DType dtype, std::vector<int64_t> shape);

// Operations that belong together, such as the buckets of a tree. If the ranks disagree about one of them, every rank
// fails all undecided ones. Otherwise an operation that only some ranks have would wait for ever, or be taken for a
// part of the next run.
struct Family {
  std::string name;  // empty: the operation stands alone
  size_t members = 0;  // number of members of all its operations; 0: not compared
  int64_t structure = 0;  // a digest of the family's members, equal on ranks that have the same ones
  int64_t run = 0;  // tells the runs of this rank apart; the ranks need not agree on it

  static auto fields(auto& its) { return std::tie(its.name, its.members, its.structure); }
};

// How the floating-point values of an allreduce (Sum or Average) are encoded between hosts.
struct Compression {
  CodecKind kind = CodecKind::none;  // also none if an optimizer sends this tensor without a codec
  // The optimizer's codec, so that ranks with different codecs disagree about each tensor.
  CodecKind asked = CodecKind::none;
  double share = 0;  // share of the values that travel, for codecs that leave some out
  bool error_feedback = false;  // add what a code leaves out to the next values of the same tensor
  uint64_t start = 0;  // how many uses of a tensor's name come before the first encoded one
  std::string owner = {};  // owner of the tensors, if another owner may use the same names

  bool operator==(const Compression&) const = default;
  static auto fields(auto& its) {
    return std::tie(its.kind, its.asked, its.share, its.error_feedback, its.start, its.owner);
  }
};
// `text`: as `text_of` in horovodish/collectives/operation.py makes it, with the fields in this order; empty for none.
// Throws std::invalid_argument for any other text.
Compression compression_of(const std::string& text);

struct Request {
  static constexpr int kHost = -1;
  static constexpr int kSomeGpu = -2;  // for a joined rank that has named no GPU
  static constexpr WorldRank kAnyRank{-1};

  Kind kind = Kind::allreduce;
  std::string name;
  std::string function;  // of the caller, if several of its functions make operations of this kind; else empty
  ReduceOp op = ReduceOp::sum;
  double prescale = 1.0;
  double postscale = 1.0;
  WorldRank root{};  // of a broadcast: its root; of a send: the receiver; of a receive: the sender, or kAnyRank
  uint32_t tag = 0;  // of a send or a receive, which no other rank negotiates
  // Of a reducescatter or an allgather. True: a rank's part consists of elements, from the members of one dtype laid
  // end to end, and keeps its place in the whole. False: a rank's part consists of rows of each member.
  bool by_elements = false;
  // The end of each rank's part of the elements of the dtype. Empty: the parts are as even as possible.
  std::vector<int64_t> ends;
  Compression compression;
  int device = kHost;  // otherwise the CUDA ordinal of this rank
  // Sizes of chunks and segments for this operation; 0: the settings decide.
  size_t chunk_bytes = 0;  // within a host
  size_t segment_bytes = 0;  // between hosts that have one rank each
  std::vector<Member> members;
  Family family;
  std::string refusal;  // why this rank cannot take part, so that the others do not wait for it; empty if it can

  // A signature contains only the kind of device: ranks use different ordinals for "my GPU".
  static auto fields(auto& its) {
    return std::tie(its.family, its.kind, its.name, its.function, its.op, its.prescale, its.postscale, its.root,
                    its.by_elements, its.ends, its.compression, its.chunk_bytes, its.segment_bytes, its.members,
                    its.refusal);
  }

  bool on_host() const { return device == kHost; }
  // Returns whether it concerns only this rank and one other, not the whole process set.
  bool is_transfer() const { return kind == Kind::send || kind == Kind::receive; }
  // Returns whether the ranks may differ in the number of rows, so that only the engine knows the size of the results.
  bool any_rows() const { return (kind == Kind::allgather && !by_elements) || kind == Kind::alltoall; }

  // Two ranks ask for the same operation exactly when their signatures are equal byte for byte.
  std::string signature() const;
  static Request decode(std::string_view signature);
  // The family's name, read without decoding the other fields.
  static std::string_view family_of(std::string_view signature);

  // Why the operation needs a contribution of the joined ranks; empty if it does not.
  std::string problem_with_joined(const RankSet& joined) const;
};

// Bytes of one row of a member whose first dimension may differ by rank; of any other member, all of its bytes.
inline size_t row_bytes(const Member& member) { return static_cast<size_t>(member.count()) * bytes_of(member.dtype); }

// Marks the number in the name of an operation that the caller has not named.
inline constexpr std::string_view kUnnamed = ".noname.";
inline bool is_unnamed(const std::string& name) { return name.find(kUnnamed) != std::string::npos; }

// A name in messages: 'loss'. If the caller gave no name: call 1 of allreduce, or a call of process group 0 if the name
// has no number.
std::string shown(std::string_view name);
// The first tensor, which messages name if the caller has not named the operation. Empty if he has.
std::string_view tensor_for(const Request& request);
// An operation in messages: 'layer.weight' and 3 more, or 'loss'.
std::string label_of(const Request& request);
// The same, from what all ranks know: a signature has no labels.
inline std::string label_of(std::string_view signature) { return label_of(Request::decode(signature)); }

// The requests that were made under one name, and by whom: one, unless the ranks disagree.
using Signatures = std::vector<std::pair<std::string, RankSet>>;

// The operation `name` and all operations of `families` end on every rank with this text.
struct Fail {
  std::string name, text;
  std::vector<std::string> families = {};

  // Whether it ends a statement with this signature.
  bool ends(std::string_view its_name, std::string_view signature) const;
  static auto fields(auto& its) { return std::tie(its.name, its.text, its.families); }
};
// Describes how the requests of one name differ, or which rank refuses, with ranks and values. The text is empty if all
// are equal. No families are named if every refusing rank refuses without a family.
Fail find_mismatch(std::string_view name, Signatures signatures);

}  // namespace horovodish
