// What a rank asks for: one collective over one tensor, or over the tensors of a bucket that are negotiated as a unit.
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
  std::string label = {};  // what the messages of this rank call it instead; the ranks need not agree on it

  static auto fields(auto& its) { return std::tie(its.name, its.dtype, its.shape); }

  static constexpr int64_t kAnyLength = -1;
  // Elements; of an allgather, elements per row.
  int64_t count() const;
};

// `text`: the name, and the label after a tab if there is one.
Member member_of(std::string_view text, DType dtype, std::vector<int64_t> shape);

// Operations that belong together, as the buckets of a tree do. Where the ranks disagree about one of them, every rank fails
// all of them that are not decided: otherwise what only some ranks have would wait for ever, or be taken for a part of
// what comes next.
struct Family {
  std::string name;  // empty: the operation stands alone
  size_t members = 0;  // of all its operations; 0 where that is not compared
  int64_t structure = 0;  // a digest of what there is, equal on ranks that have the same
  int64_t run = 0;  // tells those of this rank apart; the ranks need not agree on it

  static auto fields(auto& its) { return std::tie(its.name, its.members, its.structure); }
};

// What travels between hosts in place of the floating-point values of an allreduce whose op is Sum or Average.
struct Compression {
  CodecKind kind = CodecKind::none;  // none also where an optimizer sends this tensor as it is
  CodecKind asked = CodecKind::none;  // the optimizer's, so that ranks whose codecs differ disagree about each tensor
  double share = 0;  // of the values that travel, for the codecs that leave some out
  bool error_feedback = false;  // whether a rank adds what a code leaves out to what it encodes next of the same tensor
  uint64_t start = 0;  // how many uses of each tensor's name come before the first one that is encoded
  std::string owner = {};  // of the tensors, where their names do not tell them from those of another owner

  bool operator==(const Compression&) const = default;
  static auto fields(auto& its) {
    return std::tie(its.kind, its.asked, its.share, its.error_feedback, its.start, its.owner);
  }
};
// `text`: as `text_of` in horovodish/collectives/operation.py, the fields in their order; empty for none. Throws
// std::invalid_argument for text that is nothing of the kind.
Compression compression_of(const std::string& text);

struct Request {
  static constexpr int kHost = -1;
  static constexpr int kSomeGpu = -2;  // on a rank that has joined and named none
  static constexpr WorldRank kAnyRank{-1};

  Kind kind = Kind::allreduce;
  std::string name;
  ReduceOp op = ReduceOp::sum;
  double prescale = 1.0;
  double postscale = 1.0;
  WorldRank root{};  // of a broadcast; of a send the rank that receives, of a receive the rank that sends, or kAnyRank
  uint32_t tag = 0;  // of a send or a receive, which no other rank negotiates
  // Of a reducescatter or an allgather: a rank's part is elements of the members of a dtype, laid end to end, and lies where it does in
  // the whole. Otherwise it is rows of each member.
  bool by_elements = false;
  // Where each rank's part of the elements of the one dtype ends. Empty: the parts are as even as possible.
  std::vector<int64_t> ends;
  Compression compression;
  int device = kHost;  // otherwise the CUDA ordinal of this rank
  // How it moves, where that is not left to the settings; 0 where it is.
  size_t chunk_bytes = 0;  // within a host
  size_t segment_bytes = 0;  // between hosts that have one rank each
  std::vector<Member> members;
  Family family;
  std::string refusal;  // why this rank cannot take part, so that no rank waits for it; empty when it can

  // Of the device, a signature says only whether it is one: ranks use different ordinals for "my GPU".
  static auto fields(auto& its) {
    return std::tie(its.family, its.kind, its.name, its.op, its.prescale, its.postscale, its.root, its.by_elements,
                    its.ends, its.compression, its.chunk_bytes, its.segment_bytes, its.members, its.refusal);
  }

  bool on_host() const { return device == kHost; }
  // Whether it concerns this rank and one other, and not the whole process set.
  bool is_transfer() const { return kind == Kind::send || kind == Kind::receive; }
  // Whether the ranks may differ in the number of rows, so that only the engine knows how long the results are.
  bool any_rows() const { return (kind == Kind::allgather && !by_elements) || kind == Kind::alltoall; }

  // Two ranks ask for the same thing exactly when their signatures are equal byte for byte.
  std::string signature() const;
  static Request decode(std::string_view signature);
  // The family's name, without decoding the rest.
  static std::string_view family_of(std::string_view signature);

  // Why the other ranks cannot do this without a contribution of the joined ones; empty when they can.
  std::string problem_with_joined(const RankSet& joined) const;
};

// Bytes of one row of a member whose first dimension may differ by rank, and of all of another one.
inline size_t row_bytes(const Member& member) { return static_cast<size_t>(member.count()) * bytes_of(member.dtype); }

// Begins the number in the name of an operation to which the caller has given none.
inline constexpr std::string_view kUnnamed = ".noname.";
inline bool is_unnamed(const std::string& name) { return name.find(kUnnamed) != std::string::npos; }

// A name in messages: 'loss'; where the caller has given none, call 1 of allreduce, or a call of process group 0 where the name
// has no number.
std::string shown(std::string_view name);
// The tensor by which messages call an operation whose name the caller has not given: its first one. Empty where it has a name.
std::string_view tensor_for(const Request& request);
// An operation in messages: 'layer.weight' and 3 more, or 'loss'.
std::string label_of(const Request& request);
// The same, as far as all ranks know it: a signature has no labels.
inline std::string label_of(std::string_view signature) { return label_of(Request::decode(signature)); }

// The operation `name`, and all operations of `families`, end on every rank with this text.
struct Fail {
  std::string name, text;
  std::vector<std::string> families = {};

  // Whether it ends a statement with this signature.
  bool ends(std::string_view its_name, std::string_view signature) const;
  static auto fields(auto& its) { return std::tie(its.name, its.text, its.families); }
};
// How the requests of one name differ, or who refuses, naming ranks and values. The text is empty when all are the same. There are
// no families where every rank that refuses does so without one.
Fail find_mismatch(std::string_view name, std::vector<std::pair<std::string, RankSet>> signatures);

}  // namespace horovodish
