// The messages between neighbours in the negotiation tree: statements go up, decisions go down.
#pragma once

#include <string>
#include <string_view>
#include <tuple>

#include "negotiation/loss.h"
#include "negotiation/note.h"
#include "negotiation/records.h"
#include "negotiation/request.h"
#include "negotiation/statement.h"
#include "negotiation/tensor_table.h"

namespace horovodish {

// Upwards, about the sender's whole subtree. The last Span tells when its ranks made the statements.

struct Ready {  // for a tensor that the cache knows
  TensorId id = 0;
  Statement statement = {};

  bool is_only_an_id() const {
    return statement.joined.empty() && statement.absent.empty() && statement.values.empty();
  }
  static auto fields(auto& its) { return std::tie(its.id, its.statement); }
};

struct FullRequest {
  std::string_view name;
  Statement statement;
  Signatures signatures;

  static auto fields(auto& its) { return std::tie(its.name, its.statement, its.signatures); }
};

struct Joined {  // of a subtree; downwards: of all ranks, so the join is done
  WorldRank last_rank;

  static auto fields(auto& its) { return std::tie(its.last_rank); }
};

// Upwards, about the sender: it has applied one more of the decisions that its parent keeps for it, see
// unacknowledged.h.
struct Acknowledgement {
  static auto fields(auto&) { return std::tie(); }
};

// Downwards.

struct Execute {  // the request stated by this id
  TensorId id = 0;
  int joined = 0;  // how many ranks do not contribute
  Mask absent = {};  // members that no rank has a value for
  std::string values = {};  // of all ranks, see Statement

  bool is_only_an_id() const { return joined == 0 && absent.empty() && values.empty(); }
  static auto fields(auto& its) { return std::tie(its.id, its.joined, its.absent, its.values); }
};

struct ExecuteNew {  // a request stated in full. It enters the cache unless `id` is kNotCached
  TensorId id;
  std::string_view name, signature;
  int joined;
  Mask absent;

  static auto fields(auto& its) { return std::tie(its.id, its.name, its.signature, its.joined, its.absent); }
};

struct Forget {  // a request leaves the cache
  TensorId id;

  static auto fields(auto& its) { return std::tie(its.id); }
};

// Lost and Note are about single ranks. They go from any rank to the root, and from the root to all ranks.
using UpwardRecords = Records<Ready, Span, FullRequest, Joined, Acknowledgement, Lost, Note>;
using DownwardRecords = Records<Execute, ExecuteNew, Forget, Fail, Joined, Lost, Note>;

}  // namespace horovodish
