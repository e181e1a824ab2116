#include "negotiation/pending.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "negotiation/tensor_table.h"

namespace horovodish {

namespace {

void add(Signatures& all, const std::string& signature, const RankSet& ranks) {
  const auto same = std::ranges::find(all, signature, &Signatures::value_type::first);
  if (same == all.end()) {
    all.emplace_back(signature, ranks);
  } else {
    same->second.add(ranks);
  }
}

}  // namespace

Participants::Participants(std::vector<RankSet> subtrees) : ranks(std::move(subtrees)) {
  if (ranks.empty() || ranks.size() > kMostParticipants) throw std::invalid_argument("a node has 1 to 64 participants");
}

RankSet Participants::ranks_of(ParticipantBits bits) const {
  RankSet all;
  for (size_t i = 0; i < count(); ++i) {
    if (bits & bit_of(i)) all.add(ranks[i]);
  }
  return all;
}

void Pending::end() {
  serial_ = 0;
  stated_ = by_id_ = 0;
  passed_up_ = false;
  span_ = {};
  joined_ = {};
  absent_.clear();
  values_.clear();
  in_full_.clear();
}

void Pending::state(size_t participant, const Statement& statement) {
  span_.add(statement.span);
  joined_.add(statement.joined);
  if (!statement.values.empty()) {
    values_.resize(std::max(values_.size(), participant + 1));
    values_[participant] = statement.values;
  }
  const bool first = stated_ == 0 && in_full_.empty();
  absent_ = first ? statement.absent : intersection(absent_, statement.absent);
}

void Pending::state_by_id(size_t participant, const CachedRequest& request, const Statement& statement) {
  state(participant, statement);
  cached_ = &request;
  stated_ |= bit_of(participant);
  by_id_ |= bit_of(participant);
}

void Pending::state_in_full(size_t participant, const Statement& statement, const Signatures& signatures, bool whole) {
  state(participant, statement);
  if (whole) stated_ |= bit_of(participant);
  for (const auto& [signature, ranks] : signatures) add(in_full_, signature, ranks);
}

void Pending::forget(const CachedRequest& request, const Participants& participants) {
  if (by_id_ == 0 || cached_ != &request) return;
  in_full_ = signatures(participants);
  by_id_ = 0;
}

bool Pending::remove_failed(const std::function<bool(std::string_view)>& has_failed, const Participants& participants) {
  ParticipantBits incomplete = by_id_ != 0 && has_failed(cached_->signature) ? std::exchange(by_id_, 0) : 0;
  RankSet failed;
  std::erase_if(in_full_, [&](const auto& its) {
    if (!has_failed(its.first)) return false;
    failed.add(its.second);
    return true;
  });
  for (size_t i = 0; i < participants.count(); ++i) {
    if (participants.ranks[i].overlaps(failed)) incomplete |= bit_of(i);
  }
  stated_ &= ~incomplete;
  if (incomplete != 0) passed_up_ = false;
  return by_id_ != 0 || !in_full_.empty();
}

Statement Pending::summary(const Participants& participants) const {
  Statement all{span_, joined_, absent_};
  for (const std::string& values : values_) all.values += values;
  if (stated_ != participants.all()) all.joined.add(participants.ranks_of(participants.all() & ~stated_));
  for (const auto& [signature, ranks] : in_full_) all.joined.remove(ranks);
  return all;
}

Signatures Pending::signatures(const Participants& participants) const {
  Signatures all = in_full_;
  RankSet by_id = participants.ranks_of(by_id_);
  by_id.remove(joined_);
  if (!by_id.empty()) add(all, cached_->signature, by_id);
  return all;
}

}  // namespace horovodish
