// What the neighbours in the negotiation's tree say to each other: statements upwards, decisions downwards.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "negotiation/loss.h"
#include "negotiation/note.h"
#include "negotiation/records.h"
#include "negotiation/response_cache.h"
#include "negotiation/statement.h"

namespace horovodish {

// Upwards, of the sender's whole subtree. Its ranks have made the statements in the Span that was sent last.

struct Ready {  // for a tensor that the cache knows
  ResponseCache::Id id = 0;
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

struct Joined {
  WorldRank last_rank;

  static auto fields(auto& its) { return std::tie(its.last_rank); }
};

struct Waiting {
  uint64_t decisions_seen;

  static auto fields(auto& its) { return std::tie(its.decisions_seen); }
};

// Upwards, of the sender: it has applied one more of the decisions that its parent remembers for it, see unheard.h.
struct Heard {
  static auto fields(auto&) { return std::tie(); }
};

// Downwards.

struct Execute {  // what was stated by this id
  ResponseCache::Id id = 0;
  int joined = 0;  // how many ranks do not contribute
  Mask absent = {};  // members that no rank has a value for
  std::string values = {};  // of all ranks, see Statement

  bool is_only_an_id() const { return joined == 0 && absent.empty() && values.empty(); }
  static auto fields(auto& its) { return std::tie(its.id, its.joined, its.absent, its.values); }
};

struct ExecuteNew {  // what was stated in full. It enters the cache, unless `id` is kNotCached
  static constexpr ResponseCache::Id kNotCached = 0;

  ResponseCache::Id id;
  std::string_view name, signature;
  int joined;
  Mask absent;

  static auto fields(auto& its) { return std::tie(its.id, its.name, its.signature, its.joined, its.absent); }
};

struct Forget {  // it leaves the cache
  ResponseCache::Id id;

  static auto fields(auto& its) { return std::tie(its.id); }
};

struct Fail {
  std::string_view name, text;
  std::vector<std::string> families;

  static auto fields(auto& its) { return std::tie(its.name, its.text, its.families); }
};

struct JoinDone {
  WorldRank last_rank;

  static auto fields(auto& its) { return std::tie(its.last_rank); }
};

// Lost and Note are of single ranks, and go from any rank to the root and from the root to all of them.
using UpwardRecords = Records<Ready, Span, FullRequest, Joined, Waiting, Heard, Lost, Note>;
using DownwardRecords = Records<Execute, ExecuteNew, Forget, Fail, JoinDone, Lost, Note>;

}  // namespace horovodish
