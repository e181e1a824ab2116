#include "negotiation/negotiation.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>

#include "negotiation/request.h"

namespace horovodish {

namespace {

constexpr size_t kShownTensors = 5;  // in a message about tensors that wait
constexpr const char* kRemedies =
    ". Remedy: call the same collectives under the same names on every rank. Usual causes: the ranks have different "
    "numbers "
    "of batches (use a sampler that gives all the same number, or call hvd.join() after a rank's last batch), or a "
    "collective is called under `if rank == 0:`.";
constexpr uint64_t kDoesNotWait = std::numeric_limits<uint64_t>::max();  // instead of a number of decisions

std::vector<std::string> families_of(const Request& request) {
  if (request.family.name.empty()) return {};
  return {request.family.name};
}

template <class Key>
std::vector<Key> complete_ones(const std::unordered_map<Key, Pending>& tensors) {
  std::vector<Key> keys;
  for (const auto& [key, pending] : tensors) {
    if (pending.complete()) keys.push_back(key);
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

}  // namespace

void Lateness::add(double seconds) {
  ++times_last;
  total_seconds += seconds;
  longest_seconds = std::max(longest_seconds, seconds);
}

// What a child says of its subtree counts for its participant; what it passes on of single ranks is for the root.
class Negotiation::Child final : public Upward {
 public:
  Child(Negotiation& node, size_t participant) : node_(node), participant_(participant) {}

  void ready(Id id, const Statement& statement) override { node_.state_id(participant_, id, statement); }
  void request(std::string_view name, const Signatures& signatures, const Statement& statement) override {
    node_.state_request(participant_, std::string(name), signatures, statement);
  }
  void joined(WorldRank last_rank) override { node_.state_joined(participant_, last_rank); }
  void waiting(uint64_t decisions_seen) override { node_.state_waiting(participant_, decisions_seen); }
  void heard() override { node_.hear(participant_); }
  void lost(const Lost& lost) override { node_.lost(lost); }
  void say(const Note& note) override { node_.say(note); }

 private:
  Negotiation& node_;
  const size_t participant_;
};

Negotiation::Negotiation(bool root, std::vector<RankSet> participants, size_t cache_capacity)
    : root_(root),
      participants_(std::move(participants)),
      cache_(cache_capacity),
      unheard_(participants_.count() - 1),
      waiting_(participants_.count()),
      up_(participants_.count() == 1) {}

void Negotiation::from_child(size_t child, std::string_view message) {
  Child receiver(*this, child);
  read_upward(message, participants_.ranks[child], now_, receiver);
}

void Negotiation::from_parent(std::string_view message) { read_downward(message, *this); }

void Negotiation::submit(std::string_view name, std::string_view signature, const Mask& absent) {
  if (participants_.joined[0]) {
    // The other ranks go on without this one: they count it as joined, whatever it states now.
    if (!lost_ && !is_stale(0, name, signature)) {
      after_join_.push_back({std::string(name), std::string(signature), absent});
    }
    return;
  }
  const auto id = cache_.find(name);
  if (id && *cache_.signature(*id) == signature && !by_name_.contains(std::string(name))) {
    state_id(0, *id, own_statement(absent));
  } else {
    ++full_requests_;
    state_signature(0, std::string(name), signature, own_statement(absent));
  }
}

void Negotiation::flush() {
  const auto own = [](const auto& entry) { return entry.second.stated_here(); };
  if (std::any_of(by_id_.begin(), by_id_.end(), own) || std::any_of(by_name_.begin(), by_name_.end(), own)) {
    state_waiting(0, decisions_seen_);
  }
}

void Negotiation::take_back_flush() {
  if (waiting_[0]) take_back_waiting(0);
}

void Negotiation::join() { state_joined(0, own_rank()); }

void Negotiation::lost(const Lost& lost) {
  if (root_) return give_up(lost);
  up_.lost(lost);
}

void Negotiation::say(const Note& note) {
  if (root_) {
    decisions_.push_back({.type = Decision::Type::said, .note = note});
  } else {
    up_.say(note);
    urgent_ = true;
  }
}

void Negotiation::announce(const Note& note) {
  down_.announce(note);
  decisions_.push_back({.type = Decision::Type::announced, .note = note});
}

// For the parent's Unheard.
void Negotiation::acknowledge() {
  if (!root_) up_.heard();
}

std::optional<Decision> Negotiation::take_decision() {
  if (decisions_.empty()) return std::nullopt;
  std::optional<Decision> oldest = std::move(decisions_.front());
  decisions_.pop_front();
  return oldest;
}

void Negotiation::hear(size_t participant) {
  if (!lost_) unheard_.heard(participant - 1);
}

bool Negotiation::is_stale(size_t participant, std::string_view name, std::string_view signature) const {
  if (participant > 0) return unheard_.has_failed(participant - 1, name, signature);
  return std::any_of(decisions_.begin(), decisions_.end(), [&](const Decision& decision) {
    return decision.type == Decision::Type::fail && Failed{decision.name, decision.families}.ends(name, signature);
  });
}

void Negotiation::state_id(size_t participant, Id id, const Statement& statement) {
  if (lost_) return;
  const std::string* signature = cache_.signature(id);
  if (signature == nullptr) {
    const Forgotten* const forgotten = participant > 0 ? unheard_.forgotten(participant - 1, id) : nullptr;
    if (forgotten == nullptr) throw std::runtime_error("control message: it names an unknown id");
    return state_signature(participant, forgotten->name, forgotten->signature, statement);
  }
  const std::string& name = cache_.name(id);
  if (is_stale(participant, name, *signature)) return;
  if (!by_name_.empty() && by_name_.contains(name)) return state_signature(participant, name, *signature, statement);
  Pending& pending = by_id_.try_emplace(id, participants_, ++statements_).first->second;
  pending.state(participant, statement);
  take_back_waiting(participant);
  if (pending.complete()) finish_id(id);
}

void Negotiation::state_signature(size_t participant, const std::string& name, std::string_view signature,
                                  const Statement& statement) {
  RankSet ranks = participants_.ranks[participant];
  ranks.remove(statement.joined);
  // Copies: the decision may drop the name from the cache, where it may be from.
  state_request(participant, std::string(name), {{std::string(signature), std::move(ranks)}}, statement);
}

void Negotiation::state_request(size_t participant, const std::string& name, Signatures signatures,
                                const Statement& statement) {
  if (lost_) return;
  const size_t stale =
      std::erase_if(signatures, [&](const auto& its) { return is_stale(participant, name, its.first); });
  if (signatures.empty()) return;
  Pending& pending = stated_in_full(name);
  pending.state(participant, statement, stale == 0);
  pending.add(signatures);
  take_back_waiting(participant);
  if (pending.complete()) finish_request(name);
}

Pending& Negotiation::stated_in_full(const std::string& name) {
  if (const auto found = by_name_.find(name); found != by_name_.end()) return found->second;
  // Others may have stated the same name by its id, with the signature that the cache holds.
  if (const auto id = cache_.find(name); id && by_id_.contains(*id)) return to_full_request(*id);
  return by_name_.try_emplace(name, participants_, ++statements_).first->second;
}

// Statements made by this id so far count as statements by its name from now on.
Pending& Negotiation::to_full_request(Id id) {
  auto found = by_id_.extract(id);
  found.mapped().to_full_request(*cache_.signature(id));
  return by_name_.emplace(cache_.name(id), std::move(found.mapped())).first->second;
}

void Negotiation::state_joined(size_t participant, WorldRank last_rank) {
  if (lost_) return;
  participants_.joined[participant] = true;
  last_joined_ = last_rank;
  finish_complete();
  finish_joined();
  if (!joined_sent_) finish_waiting();  // perhaps all others wait already
}

void Negotiation::state_waiting(size_t participant, uint64_t decisions_seen) {
  if (lost_ || waiting_[participant] == decisions_seen) return;
  if (decisions_seen == kDoesNotWait) return take_back_waiting(participant);
  waiting_[participant] = decisions_seen;
  finish_waiting();
}

// It has submitted something more, which the parent does not hear of while other ranks of the subtree have not.
void Negotiation::take_back_waiting(size_t participant) {
  const bool said_so = !root_ && all_wait();
  waiting_[participant].reset();
  if (said_so) up_.waiting(kDoesNotWait);
}

bool Negotiation::all_wait() const {
  for (size_t i = 0; i < participants_.count(); ++i) {
    if (!participants_.joined[i] && waiting_[i] != decisions_seen_) return false;
  }
  return !lost_;
}

void Negotiation::finish_id(Id id) {
  Pending& pending = by_id_.at(id);
  if (root_) return decide(cache_.name(id), *cache_.signature(id), pending.summary(), id);
  pending.set_passed_up();
  up_.ready(id, pending.summary());
}

void Negotiation::finish_request(const std::string& name) {
  Pending& pending = by_name_.at(name);
  if (root_) {
    const Mismatch mismatch = find_mismatch(pending.signatures());
    if (!mismatch.text.empty()) return fail(name, mismatch.text, mismatch.families);
    const std::string signature = pending.signatures()[0].first;
    return decide(name, signature, pending.summary(), std::nullopt);
  }
  pending.set_passed_up();
  up_.request(name, pending.signatures(), pending.summary());
}

void Negotiation::finish_complete() {
  // One that fails may end others, or leave them without some of their ranks.
  for (const Id id : complete_ones(by_id_)) {
    if (const auto found = by_id_.find(id); found != by_id_.end() && found->second.complete()) finish_id(id);
  }
  for (const std::string& name : complete_ones(by_name_)) {
    if (const auto found = by_name_.find(name); found != by_name_.end() && found->second.complete()) {
      finish_request(name);
    }
  }
}

void Negotiation::finish_joined() {
  const auto& joined = participants_.joined;
  if (joined_sent_ || std::find(joined.begin(), joined.end(), false) != joined.end()) return;
  if (root_) return join_done(last_joined_);
  joined_sent_ = true;
  up_.joined(last_joined_);
}

// Ranks that wait at the same point of the decision stream will not say anything more before the next decision.
void Negotiation::finish_waiting() {
  if (!all_wait()) return;
  if (!root_) return up_.waiting(decisions_seen_);
  if (!anything_pending()) return;
  decisions_.push_back(
      {.type = Decision::Type::stuck,
       .text = "every rank waits, but not for the same tensors, so none can go on: " + describe_pending() + kRemedies});
}

// The root: every rank has submitted the same, or has joined.
void Negotiation::decide(const std::string& name, const std::string& signature, const Statement& statement,
                         std::optional<Id> id) {
  if (!statement.joined.empty()) {
    const Request request = Request::decode(signature);
    const std::string problem = request.problem_with_joined(statement.joined);
    if (!problem.empty()) return fail(name, problem, families_of(request));
  }
  lateness_[*statement.span.last_rank].add(statement.span.seconds());
  if (id) {
    execute(*id, statement.joined.count(), statement.absent);
  } else {
    decide_new(name, signature, statement.joined.count(), statement.absent);
  }
}

void Negotiation::decide_new(const std::string& name, const std::string& signature, int joined, const Mask& absent) {
  Id victim = kNotCached;
  bool room = true;
  if (const auto old = cache_.find(name)) {
    forget(*old);
  } else {
    const auto space = cache_.make_room(name, victim);
    if (space == ResponseCache::Room::evict) forget(victim);
    room = space != ResponseCache::Room::none;
  }
  execute_new(room ? cache_.next_id() : kNotCached, name, signature, joined, absent);
}

const std::string& Negotiation::known_signature(Id id) const {
  const std::string* signature = cache_.signature(id);
  if (signature == nullptr) throw std::runtime_error("control message: a decision about an id that is not cached");
  return *signature;
}

void Negotiation::execute(Id id, int joined, const Mask& absent) {
  const std::string& signature = known_signature(id);
  down_.execute(id, joined, absent);
  const auto pending = by_id_.extract(id);
  const bool submitted = !pending.empty() && pending.mapped().stated_here();
  cache_.touch(id);
  decisions_.push_back({.type = Decision::Type::execute,
                        .name = cache_.name(id),
                        .submitted = submitted,
                        .signature = submitted ? std::string{} : signature,
                        .joined_ranks = joined,
                        .absent = absent,
                        .number = ++decisions_seen_});
}

void Negotiation::execute_new(Id id, std::string_view name, std::string_view signature, int joined,
                              const Mask& absent) {
  down_.execute_new(id, name, signature, joined, absent);
  const auto pending = by_name_.extract(std::string(name));
  const bool submitted = !pending.empty() && pending.mapped().stated_here();
  if (id != kNotCached) cache_.insert(id, name, signature);
  decisions_.push_back({.type = Decision::Type::execute,
                        .name = std::string(name),
                        .submitted = submitted,
                        .signature = submitted ? std::string{} : std::string(signature),
                        .joined_ranks = joined,
                        .absent = absent,
                        .number = ++decisions_seen_});
}

void Negotiation::forget(Id id) {
  const std::string& signature = known_signature(id);
  down_.forget(id);
  acknowledge();
  if (!lost_) unheard_.add(Forgotten{id, cache_.name(id), signature});
  if (by_id_.contains(id)) to_full_request(id);
  cache_.erase(id);
}

void Negotiation::fail(std::string_view name, std::string_view text, const std::vector<std::string>& families) {
  down_.fail(name, text, families);
  acknowledge();
  const Failed failed{std::string(name), families};
  if (!lost_) unheard_.add(failed);
  std::erase_if(
      by_id_, [&](const auto& entry) { return failed.ends(cache_.name(entry.first), *cache_.signature(entry.first)); });
  for (auto entry = by_name_.begin(); entry != by_name_.end();) {
    const auto is_stale = [&](const std::string& signature) { return failed.ends(entry->first, signature); };
    entry = entry->second.take_out(is_stale) ? std::next(entry) : by_name_.erase(entry);
  }
  std::erase_if(after_join_, [&](const HeldBack& its) { return failed.ends(its.name, its.signature); });
  decisions_.push_back(
      {.type = Decision::Type::fail, .name = std::string(name), .text = std::string(text), .families = families});
  ++decisions_seen_;
  // Where ranks of a family are taken out, those that are left may be complete: the others have joined.
  if (!joined_sent_) finish_complete();
}

void Negotiation::join_done(WorldRank last_rank) {
  down_.join_done(last_rank);
  participants_.joined.assign(participants_.count(), false);
  joined_sent_ = false;
  decisions_.push_back({.type = Decision::Type::join_done, .rank = last_rank});
  ++decisions_seen_;
  for (const HeldBack& its : std::exchange(after_join_, {})) submit(its.name, its.signature, its.absent);
}

void Negotiation::give_up(const Lost& lost) {
  if (lost_ && lost.loss <= lost_->loss && lost.finished >= finished_) return;
  down_.give_up(lost);
  by_id_.clear();
  by_name_.clear();
  unheard_.clear();
  after_join_.clear();
  finished_ = lost_ ? std::min(finished_, lost.finished) : lost.finished;
  if (!lost_) lost_ = lost;
  decisions_.push_back({.type = Decision::Type::lost, .text = lost.text, .loss = lost.loss, .number = finished_});
}

bool Negotiation::any_joined() const {
  const auto& joined = participants_.joined;
  return !lost_ && std::find(joined.begin(), joined.end(), true) != joined.end();
}

std::optional<uint64_t> Negotiation::oldest() const {
  std::optional<uint64_t> result;
  for (const auto& [id, pending] : by_id_) result = std::min(result.value_or(pending.serial()), pending.serial());
  for (const auto& [name, pending] : by_name_) result = std::min(result.value_or(pending.serial()), pending.serial());
  return result;
}

std::string Negotiation::describe_pending() const {
  std::map<uint64_t, std::string> lines;
  for (const auto& [id, pending] : by_id_) lines[pending.serial()] = pending.describe(label_of(*cache_.signature(id)));
  for (const auto& [_, pending] : by_name_)
    lines[pending.serial()] = pending.describe(label_of(pending.signatures()[0].first));
  std::string text;
  size_t shown = 0;
  for (const auto& [serial, one] : lines) {
    if (shown == kShownTensors) return text + "; and " + std::to_string(lines.size() - shown) + " more";
    text += (shown++ == 0 ? "" : "; ") + one;
  }
  if (!any_joined()) return text;
  RankSet joined, missing;
  for (size_t i = 0; i < participants_.count(); ++i) {
    (participants_.joined[i] ? joined : missing).add(participants_.ranks[i]);
  }
  return text + (text.empty() ? "" : "; ") + "join() was called by " + joined.text() + " but not by " + missing.text();
}

}  // namespace horovodish
