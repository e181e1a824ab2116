#include "negotiation.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "request.h"

namespace horovodish {

namespace {

// Records of the messages that travel up and down the tree.
enum class Up : uint64_t {
  ready = Records::kOne,
  ready_run = Records::kRun,
  ready_with,
  span,  // when what follows in this message was stated
  request,
  joined,
  waiting,
  lost,
  told,
  turn
};
enum class Down : uint64_t {
  execute = Records::kOne,
  execute_run = Records::kRun,
  execute_with,
  execute_new,
  forget,
  fail,
  join_done,
  lost,
  ask,
  turn
};

constexpr ResponseCache::Id kNotCached = 0;
constexpr size_t kShownTensors = 5;  // in a message about tensors that wait
// Statements less than this apart count as made at one time, so that they need not say it each.
constexpr double kMomentSeconds = 1e-4;

template <class Record>
void begin(Records& records, Record record) {
  records.begin(static_cast<uint64_t>(record));
}

std::vector<std::string> families_of(const Request& request) {
  if (request.family.name.empty()) return {};
  return {request.family.name};
}

Mask intersection(const Mask& a, const Mask& b) {
  if (a.empty() || b.empty()) return {};
  Mask both = a;
  bool any = false;
  for (size_t i = 0; i < both.size(); ++i) {
    both[i] = static_cast<char>(both[i] & b[i]);
    any |= both[i] != 0;
  }
  return any ? both : Mask{};
}

}  // namespace

Mask make_mask(const std::vector<size_t>& bits, size_t size) {
  if (bits.empty()) return {};
  Mask mask((size + 7) / 8, '\0');
  for (const size_t bit : bits) mask[bit / 8] = static_cast<char>(mask[bit / 8] | (1 << (bit % 8)));
  return mask;
}

bool mask_bit(const Mask& mask, size_t bit) { return bit / 8 < mask.size() && ((mask[bit / 8] >> (bit % 8)) & 1) != 0; }

Negotiation::Negotiation(bool root, std::vector<RankSet> participants, size_t cache_capacity)
    : root_(root),
      participants_(std::move(participants)),
      cache_(cache_capacity),
      joined_(participants_.size()),
      waiting_(participants_.size()) {}

void Negotiation::submit(std::string_view name, std::string_view signature, const Mask& absent) {
  if (lost_) {
    decisions_.push_back(
        {.type = Decision::Type::refuse, .name = std::string(name), .text = lost_->text, .loss = lost_->loss});
    return;
  }
  const auto id = cache_.find(name);
  if (id && *cache_.signature(*id) == signature && !by_name_.contains(std::string(name))) {
    state_id(0, own_span(), *id, {}, absent);
  } else {
    ++full_requests_;
    state_request(0, own_span(), name, {{std::string(signature), participants_[0]}}, {}, absent);
  }
}

void Negotiation::flush() {
  const auto own = [](const auto& entry) { return entry.second.stated[0]; };
  if (std::any_of(by_id_.begin(), by_id_.end(), own) || std::any_of(by_name_.begin(), by_name_.end(), own)) {
    state_waiting(0, decisions_seen_);
  }
}

void Negotiation::join() { state_joined(0, own_rank()); }

void Negotiation::lost(const Lost& lost) {
  if (root_) return apply_lost(lost);
  begin(up_, Up::lost);
  lost.encode(up_);
}

void Negotiation::ask() {
  begin(down_, Down::ask);
  decisions_.push_back({.type = Decision::Type::asked});
}

void Negotiation::tell(int rank, std::string_view text) {
  if (root_) {
    decisions_.push_back({.type = Decision::Type::told, .text = std::string(text), .rank = rank});
    return;
  }
  begin(up_, Up::told);
  up_.number(static_cast<uint64_t>(rank));
  up_.text(text);
}

void Negotiation::ask_turn(int process_set, uint64_t decision) {
  if (root_) return apply_turn(process_set, decision);
  begin(up_, Up::turn);
  up_.number(static_cast<uint64_t>(process_set));
  up_.number(decision);
  urgent_ = true;
}

void Negotiation::from_child(size_t child, std::string_view message) {
  Reader reader(message);
  Span span;
  while (!reader.done()) {
    switch (static_cast<Up>(reader.number())) {
      case Up::span:
        span = read_span(reader, child);
        break;
      case Up::ready:
        state_id(child, span, static_cast<Id>(reader.number()), {}, {});
        break;
      case Up::ready_run: {
        const auto first = static_cast<Id>(reader.number()), count = static_cast<Id>(reader.number());
        for (Id i = 0; i < count; ++i) state_id(child, span, first + i, {}, {});
        break;
      }
      case Up::ready_with: {
        const auto id = static_cast<Id>(reader.number());
        const RankSet joined = RankSet::decode(reader);
        state_id(child, span, id, joined, Mask(reader.text()));
        break;
      }
      case Up::request: {
        const std::string name(reader.text());
        const RankSet joined = RankSet::decode(reader);
        const Mask absent(reader.text());
        Signatures signatures(reader.number());
        for (auto& [signature, ranks] : signatures) {
          signature = reader.text();
          ranks = RankSet::decode(reader);
        }
        state_request(child, span, name, signatures, joined, absent);
        break;
      }
      case Up::joined:
        state_joined(child, static_cast<int>(reader.number()));
        break;
      case Up::waiting:
        state_waiting(child, reader.number());
        break;
      case Up::lost:
        lost(Lost::decode(reader));
        break;
      case Up::told: {
        const auto rank = static_cast<int>(reader.number());
        tell(rank, reader.text());
        break;
      }
      case Up::turn: {
        const auto process_set = static_cast<int>(reader.number());
        ask_turn(process_set, reader.number());
        break;
      }
    }
  }
}

void Negotiation::from_parent(std::string_view message) {
  Reader reader(message);
  while (!reader.done()) {
    switch (static_cast<Down>(reader.number())) {
      case Down::execute:
        apply_execute(static_cast<Id>(reader.number()), 0, {});
        break;
      case Down::execute_run: {
        const auto first = static_cast<Id>(reader.number()), count = static_cast<Id>(reader.number());
        for (Id i = 0; i < count; ++i) apply_execute(first + i, 0, {});
        break;
      }
      case Down::execute_with: {
        const auto id = static_cast<Id>(reader.number());
        const auto joined = static_cast<int>(reader.number());
        apply_execute(id, joined, Mask(reader.text()));
        break;
      }
      case Down::execute_new: {
        const auto id = static_cast<Id>(reader.number());
        const std::string_view name = reader.text(), signature = reader.text();
        const auto joined = static_cast<int>(reader.number());
        apply_execute_new(id, name, signature, joined, Mask(reader.text()));
        break;
      }
      case Down::forget:
        apply_forget(static_cast<Id>(reader.number()));
        break;
      case Down::fail: {
        const std::string_view name = reader.text(), text = reader.text();
        std::vector<std::string> families(reader.number());
        for (std::string& family : families) family = reader.text();
        apply_fail(name, text, std::move(families));
        break;
      }
      case Down::join_done:
        apply_join_done(static_cast<int>(reader.number()));
        break;
      case Down::lost:
        apply_lost(Lost::decode(reader));
        break;
      case Down::ask:
        ask();
        break;
      case Down::turn: {
        const auto process_set = static_cast<int>(reader.number());
        apply_turn(process_set, reader.number());
        break;
      }
    }
  }
}

void Negotiation::Span::add(const Span& other) {
  if (last_rank < 0 || other.first_seconds < first_seconds) first_seconds = other.first_seconds;
  if (last_rank < 0 || other.last_seconds > last_seconds) {
    last_seconds = other.last_seconds;
    last_rank = other.last_rank;
  }
}

// A rank without children says when it made the statement; a larger subtree also who was last, and how long it took.
// Where the clock of another host is ahead of ours, a statement counts as made when it arrives.
Negotiation::Span Negotiation::read_span(Reader& reader, size_t child) const {
  const double last_seconds = std::min(reader.real(), now_);
  if (participants_[child].count() == 1) return {participants_[child].first(), last_seconds, last_seconds};
  const auto last_rank = static_cast<int>(reader.number());
  return {last_rank, last_seconds - reader.real(), last_seconds};
}

bool Negotiation::Span::is_about(const Span& other) const {
  return last_rank == other.last_rank && std::abs(first_seconds - other.first_seconds) < kMomentSeconds &&
         std::abs(last_seconds - other.last_seconds) < kMomentSeconds;
}

void Negotiation::write_span(const Span& span) {
  if (said_span_ && said_span_->is_about(span)) return;
  said_span_ = span;
  begin(up_, Up::span);
  up_.real(span.last_seconds);
  if (participants_.size() == 1) return;
  up_.number(static_cast<uint64_t>(span.last_rank));
  up_.real(span.last_seconds - span.first_seconds);
}

std::string Negotiation::take_for_parent() {
  said_span_.reset();
  return up_.take();
}

void Negotiation::mark(Pending& pending, size_t participant, const Span& span, const RankSet& joined,
                       const Mask& absent) {
  if (pending.stated.empty()) {
    pending.stated.resize(participants_.size());
    pending.serial = ++last_serial_;
  }
  pending.span.add(span);
  pending.stated[participant] = true;
  pending.joined.add(joined);
  pending.absent = pending.absent ? intersection(*pending.absent, absent) : absent;
  if (participant == 0) pending.own_absent = absent;
  waiting_[participant].reset();
}

// Made before its rank had heard that the family failed, which it will.
bool Negotiation::is_void(std::string_view signature) const {
  if (failures_.empty()) return false;
  const auto [family, attempt] = Request::attempt_of(signature);
  const auto failures = failures_.find(std::string(family));
  return failures != failures_.end() && attempt < failures->second;
}

// Takes out what is void. True when nothing is left; else those who stated that will state it again, perhaps with others
// of their subtree.
bool Negotiation::take_void(Pending& pending) const {
  RankSet ranks;
  std::erase_if(pending.signatures, [&](const auto& its) {
    if (!is_void(its.first)) return false;
    ranks.add(its.second);
    return true;
  });
  if (pending.signatures.empty()) return true;
  for (size_t i = 0; i < participants_.size(); ++i) {
    if (!participants_[i].overlaps(ranks)) continue;
    pending.stated[i] = false;
    pending.passed_up = false;
  }
  return false;
}

// All participants have stated it, and the parent has not been told yet.
bool Negotiation::complete(const Pending& pending) const {
  if (pending.passed_up) return false;
  for (size_t i = 0; i < participants_.size(); ++i) {
    if (!pending.stated[i] && !joined_[i]) return false;
  }
  return true;
}

void Negotiation::state_id(size_t participant, const Span& span, Id id, const RankSet& joined, const Mask& absent) {
  const std::string* signature = cache_.signature(id);
  // Forgotten: void. The ranks that stated it state it again, in full, when they learn that it was forgotten.
  if (lost_ || signature == nullptr || is_void(*signature)) return;
  if (!by_name_.empty() && by_name_.contains(cache_.name(id))) {
    const std::string name = cache_.name(id);
    state_request(participant, span, name, {{*signature, participants_[participant]}}, joined, absent);
    return;
  }
  Pending& pending = by_id_[id];
  mark(pending, participant, span, joined, absent);
  if (complete(pending)) finish_id(id);
}

void Negotiation::state_request(size_t participant, const Span& span, std::string_view name,
                                const Signatures& signatures, const RankSet& joined, const Mask& absent) {
  const auto is_early = [&](const auto& its) { return is_void(its.first); };
  if (lost_ || std::any_of(signatures.begin(), signatures.end(), is_early)) return;
  const std::string key(name);
  Pending& pending = by_name_[key];
  // Others may have stated the same name by its id, with the signature that the cache holds.
  if (const auto id = cache_.find(name); id && by_id_.contains(*id)) {
    pending = std::move(by_id_.at(*id));
    by_id_.erase(*id);
    RankSet ranks;
    for (size_t i = 0; i < participants_.size(); ++i) {
      if (pending.stated[i]) ranks.add(participants_[i]);
    }
    pending.signatures = {{*cache_.signature(*id), ranks}};
  }
  mark(pending, participant, span, joined, absent);
  for (const auto& [signature, ranks] : signatures) {
    const auto same = std::find_if(pending.signatures.begin(), pending.signatures.end(),
                                   [&](const auto& known) { return known.first == signature; });
    if (same == pending.signatures.end()) {
      pending.signatures.emplace_back(signature, ranks);
    } else {
      same->second.add(ranks);
    }
  }
  if (complete(pending)) finish_request(key);
}

void Negotiation::state_joined(size_t participant, int last_rank) {
  if (lost_) return;
  joined_[participant] = true;
  last_joined_ = last_rank;
  std::vector<Id> ready_ids;
  for (const auto& [id, pending] : by_id_) {
    if (complete(pending)) ready_ids.push_back(id);
  }
  std::sort(ready_ids.begin(), ready_ids.end());
  // One that fails may end others.
  for (const Id id : ready_ids) {
    if (by_id_.contains(id)) finish_id(id);
  }
  std::vector<std::string> ready_names;
  for (const auto& [name, pending] : by_name_) {
    if (complete(pending)) ready_names.push_back(name);
  }
  std::sort(ready_names.begin(), ready_names.end());
  for (const std::string& name : ready_names) {
    if (by_name_.contains(name)) finish_request(name);
  }
  check_joined();
}

void Negotiation::check_joined() {
  if (joined_sent_ || std::find(joined_.begin(), joined_.end(), false) != joined_.end()) return;
  if (root_) return apply_join_done(last_joined_);
  joined_sent_ = true;
  begin(up_, Up::joined);
  up_.number(static_cast<uint64_t>(last_joined_));
}

void Negotiation::state_waiting(size_t participant, uint64_t decisions_seen) {
  if (lost_ || waiting_[participant] == decisions_seen) return;
  waiting_[participant] = decisions_seen;
  check_waiting();
}

// Ranks that wait at the same point of the decision stream will not say anything more before the next decision.
void Negotiation::check_waiting() {
  for (size_t i = 0; i < participants_.size(); ++i) {
    if (!joined_[i] && waiting_[i] != decisions_seen_) return;
  }
  if (!root_) {
    begin(up_, Up::waiting);
    up_.number(decisions_seen_);
  } else if (anything_pending()) {
    decisions_.push_back({.type = Decision::Type::stuck, .text = describe_waiting()});
  }
}

std::string Negotiation::line(const std::string& name, const Pending& pending) const {
  RankSet stated, missing;
  for (size_t i = 0; i < participants_.size(); ++i) {
    if (!joined_[i]) (pending.stated[i] ? stated : missing).add(participants_[i]);
  }
  return "'" + name + "' was submitted by " + stated.text() + " but not by " + missing.text();
}

std::string Negotiation::describe_waiting() const {
  return "every rank waits, but not for the same tensors: " + describe_pending() +
         ". Remedy: call the same collectives under the same names on every rank.";
}

std::optional<uint64_t> Negotiation::oldest() const {
  std::optional<uint64_t> result;
  for (const auto& [id, pending] : by_id_) result = std::min(result.value_or(pending.serial), pending.serial);
  for (const auto& [name, pending] : by_name_) result = std::min(result.value_or(pending.serial), pending.serial);
  return result;
}

std::string Negotiation::describe_pending() const {
  std::map<uint64_t, std::string> lines;
  for (const auto& [id, pending] : by_id_) lines[pending.serial] = line(cache_.name(id), pending);
  for (const auto& [name, pending] : by_name_) lines[pending.serial] = line(name, pending);
  std::string text;
  size_t shown = 0;
  for (const auto& [serial, one] : lines) {
    if (shown == kShownTensors) return text + "; and " + std::to_string(lines.size() - shown) + " more";
    text += (shown++ == 0 ? "" : "; ") + one;
  }
  return text;
}

// The ranks below this node that have joined instead of submitting what all others have.
RankSet Negotiation::joined_of(const Pending& pending) const {
  RankSet joined = pending.joined;
  for (size_t i = 0; i < participants_.size(); ++i) {
    if (!pending.stated[i]) joined.add(participants_[i]);
  }
  return joined;
}

// All participants have stated `id`: the root decides, another node tells its parent.
void Negotiation::finish_id(Id id) {
  Pending& pending = by_id_.at(id);
  if (root_) return decide(cache_.name(id), *cache_.signature(id), pending, id);
  pending.passed_up = true;
  const RankSet joined = joined_of(pending);
  const Mask absent = pending.absent.value_or(Mask{});
  write_span(pending.span);
  if (joined.empty() && absent.empty()) return up_.id(id);
  begin(up_, Up::ready_with);
  up_.number(id);
  joined.encode(up_);
  up_.text(absent);
}

void Negotiation::finish_request(const std::string& name) {
  Pending& pending = by_name_.at(name);
  if (root_) {
    Mismatch mismatch = find_mismatch(pending.signatures);
    if (!mismatch.text.empty()) return apply_fail(name, mismatch.text, std::move(mismatch.families));
    const std::string signature = pending.signatures[0].first;
    return decide(name, signature, pending, std::nullopt);
  }
  pending.passed_up = true;
  write_span(pending.span);
  begin(up_, Up::request);
  up_.text(name);
  joined_of(pending).encode(up_);
  up_.text(pending.absent.value_or(Mask{}));
  up_.number(pending.signatures.size());
  for (const auto& [signature, ranks] : pending.signatures) {
    up_.text(signature);
    ranks.encode(up_);
  }
}

// The root: every rank has submitted the same, or has joined.
void Negotiation::decide(const std::string& name, const std::string& signature, const Pending& pending,
                         std::optional<Id> id) {
  const RankSet joined = joined_of(pending);
  const Mask absent = pending.absent.value_or(Mask{});
  if (!joined.empty()) {
    const Request request = Request::decode(signature);
    const std::string problem = request.problem_with_joined(joined);
    if (!problem.empty()) return apply_fail(std::string(name), problem, families_of(request));
  }
  Lateness& lateness = lateness_[pending.span.last_rank];
  const double late = pending.span.last_seconds - pending.span.first_seconds;
  ++lateness.times_last;
  lateness.total_seconds += late;
  lateness.longest_seconds = std::max(lateness.longest_seconds, late);
  if (id) {
    apply_execute(*id, joined.count(), absent);
  } else {
    decide_execute_new(name, signature, joined.count(), absent);
  }
}

void Negotiation::decide_execute_new(const std::string& name, const std::string& signature, int joined,
                                     const Mask& absent) {
  Id victim = kNotCached;
  bool room = true;
  if (const auto old = cache_.find(name)) {
    apply_forget(*old);
  } else {
    const auto space = cache_.make_room(name, victim);
    if (space == ResponseCache::Room::evict) apply_forget(victim);
    room = space != ResponseCache::Room::none;
  }
  apply_execute_new(room ? cache_.next_id() : kNotCached, name, signature, joined, absent);
}

void Negotiation::apply_execute(Id id, int joined, const Mask& absent) {
  if (joined == 0 && absent.empty()) {
    down_.id(id);
  } else {
    begin(down_, Down::execute_with);
    down_.number(id);
    down_.number(static_cast<uint64_t>(joined));
    down_.text(absent);
  }
  const auto pending = by_id_.extract(id);
  const bool submitted = !pending.empty() && pending.mapped().stated[0];
  cache_.touch(id);
  decisions_.push_back({.type = Decision::Type::execute,
                        .name = cache_.name(id),
                        .signature = submitted ? std::string{} : *cache_.signature(id),
                        .joined_ranks = joined,
                        .absent = absent,
                        .number = ++decisions_seen_});
}

void Negotiation::apply_execute_new(Id id, std::string_view name, std::string_view signature, int joined,
                                    const Mask& absent) {
  begin(down_, Down::execute_new);
  down_.number(id);
  down_.text(name);
  down_.text(signature);
  down_.number(static_cast<uint64_t>(joined));
  down_.text(absent);
  const auto pending = by_name_.extract(std::string(name));
  const bool submitted = !pending.empty() && pending.mapped().stated[0];
  if (id != kNotCached) cache_.insert(id, name, signature);
  decisions_.push_back({.type = Decision::Type::execute,
                        .name = std::string(name),
                        .signature = submitted ? std::string{} : std::string(signature),
                        .joined_ranks = joined,
                        .absent = absent,
                        .number = ++decisions_seen_});
}

void Negotiation::apply_forget(Id id) {
  begin(down_, Down::forget);
  down_.number(id);
  const auto pending = by_id_.extract(id);
  const std::string name = cache_.name(id), signature = *cache_.signature(id);
  cache_.erase(id);
  if (!pending.empty() && pending.mapped().stated[0]) {
    state_request(0, own_span(), name, {{signature, participants_[0]}}, {}, pending.mapped().own_absent);
  }
}

void Negotiation::apply_fail(std::string_view name, std::string_view text, std::vector<std::string> families) {
  begin(down_, Down::fail);
  down_.text(name);
  down_.text(text);
  down_.number(families.size());
  for (const std::string& family : families) {
    down_.text(family);
    ++failures_[family];
  }
  by_name_.erase(std::string(name));
  if (const auto id = cache_.find(name)) by_id_.erase(*id);
  std::erase_if(by_id_, [&](const auto& entry) { return is_void(*cache_.signature(entry.first)); });
  for (auto entry = by_name_.begin(); entry != by_name_.end();) {
    entry = take_void(entry->second) ? by_name_.erase(entry) : std::next(entry);
  }
  decisions_.push_back({.type = Decision::Type::fail,
                        .name = std::string(name),
                        .text = std::string(text),
                        .families = std::move(families)});
  ++decisions_seen_;
}

void Negotiation::apply_join_done(int last_rank) {
  begin(down_, Down::join_done);
  down_.number(static_cast<uint64_t>(last_rank));
  joined_.assign(joined_.size(), false);
  joined_sent_ = false;
  decisions_.push_back({.type = Decision::Type::join_done, .rank = last_rank});
  ++decisions_seen_;
}

void Negotiation::apply_turn(int process_set, uint64_t decision) {
  begin(down_, Down::turn);
  down_.number(static_cast<uint64_t>(process_set));
  down_.number(decision);
  decisions_.push_back({.type = Decision::Type::turn, .rank = process_set, .number = decision});
}

void Negotiation::apply_lost(const Lost& lost) {
  if (lost_ && lost.loss <= lost_->loss && lost.finished >= finished_) return;
  begin(down_, Down::lost);
  lost.encode(down_);
  by_id_.clear();
  by_name_.clear();
  finished_ = lost_ ? std::min(finished_, lost.finished) : lost.finished;
  if (!lost_) lost_ = lost;
  decisions_.push_back({.type = Decision::Type::lost, .text = lost.text, .loss = lost.loss, .number = finished_});
}

}  // namespace horovodish
