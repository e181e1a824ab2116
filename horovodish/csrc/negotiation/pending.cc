#include "negotiation/pending.h"

#include <algorithm>

namespace horovodish {

void Pending::state(size_t participant, const Statement& statement, bool whole) {
  if (whole) stated_[participant] = true;
  span_.add(statement.span);
  joined_.add(statement.joined);
  if (!statement.values.empty()) {
    values_.resize(stated_.size());
    values_[participant] = statement.values;
  }
  absent_ = absent_ ? intersection(*absent_, statement.absent) : statement.absent;
}

void Pending::add(const Signatures& signatures) {
  for (const auto& [signature, ranks] : signatures) {
    const auto same = std::find_if(signatures_.begin(), signatures_.end(),
                                   [&signature = signature](const auto& known) { return known.first == signature; });
    if (same == signatures_.end()) {
      signatures_.emplace_back(signature, ranks);
    } else {
      same->second.add(ranks);
    }
  }
}

void Pending::to_full_request(const std::string& signature) {
  RankSet ranks;
  for (size_t i = 0; i < participants_.count(); ++i) {
    if (stated_[i]) ranks.add(participants_.ranks[i]);
  }
  ranks.remove(joined_);
  signatures_ = {{signature, ranks}};
  values_.clear();
}

bool Pending::take_out(const std::function<bool(const std::string&)>& is_stale) {
  RankSet ranks;
  std::erase_if(signatures_, [&](const auto& its) {
    if (!is_stale(its.first)) return false;
    ranks.add(its.second);
    return true;
  });
  if (signatures_.empty()) return false;
  for (size_t i = 0; i < participants_.count(); ++i) {
    if (!participants_.ranks[i].overlaps(ranks)) continue;
    stated_[i] = false;
    passed_up_ = false;
  }
  return true;
}

bool Pending::complete() const {
  if (passed_up_) return false;
  for (size_t i = 0; i < participants_.count(); ++i) {
    if (!stated_[i] && !participants_.joined[i]) return false;
  }
  return true;
}

Statement Pending::summary() const {
  Statement all{span_, joined_, absent_.value_or(Mask{})};
  for (const std::string& values : values_) all.values += values;
  for (size_t i = 0; i < participants_.count(); ++i) {
    if (!stated_[i]) all.joined.add(participants_.ranks[i]);
  }
  for (const auto& [signature, ranks] : signatures_) all.joined.remove(ranks);
  return all;
}

std::string Pending::describe(const std::string& label) const {
  RankSet stated, missing;
  for (size_t i = 0; i < participants_.count(); ++i) {
    if (!participants_.joined[i]) (stated_[i] ? stated : missing).add(participants_.ranks[i]);
  }
  return label + " was submitted by " + stated.text() + " but not by " + missing.text();
}

}  // namespace horovodish
