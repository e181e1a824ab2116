#include "negotiation/negotiation.h"

#include <algorithm>
#include <cmath>
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
    "numbers of batches (use a sampler that gives all the same number, or call hvd.join() after a rank's last batch), "
    "they "
    "have built different models, or a collective is called under `if rank == 0:`.";
// Statements less than this apart count as made at one time, so that they need not say it each.
constexpr double kMomentSeconds = 1e-4;
constexpr uint64_t kDoesNotWait = std::numeric_limits<uint64_t>::max();  // instead of a number of decisions

std::vector<std::string> families_of(const Request& request) {
  if (request.family.name.empty()) return {};
  return {request.family.name};
}

bool is_same_moment(const Span& a, const Span& b) {
  return a.last_rank == b.last_rank && std::abs(a.first_seconds - b.first_seconds) < kMomentSeconds &&
         std::abs(a.last_seconds - b.last_seconds) < kMomentSeconds;
}

template <class Tensors>
auto complete_ones(const Tensors& tensors) {
  std::vector<typename Tensors::key_type> keys;
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
class Negotiation::Child {
 public:
  Child(Negotiation& node, size_t participant) : node_(node), participant_(participant) {}

  void operator()(const Span& span) {
    // Another host's clock may be ahead of ours.
    const double ahead = std::max(span.last_seconds - node_.now_, 0.0);
    span_ = {span.last_rank, span.first_seconds - ahead, span.last_seconds - ahead};
  }
  void operator()(Ready& ready) {
    ready.statement.span = span_;
    node_.state_id(participant_, ready.id, ready.statement);
  }
  void operator()(FullRequest request) {
    const auto is_of_nobody = [](const auto& its) { return its.second.empty(); };
    if (request.signatures.empty() || std::ranges::any_of(request.signatures, is_of_nobody)) {
      throw std::runtime_error("control message: a request of no rank");
    }
    request.statement.span = span_;
    node_.state_request(participant_, std::string(request.name), std::move(request.signatures), request.statement);
  }
  void operator()(const Joined& joined) { node_.state_joined(participant_, joined.last_rank); }
  void operator()(const Waiting& waiting) { node_.state_waiting(participant_, waiting.decisions_seen); }
  void operator()(const Heard&) { node_.hear(participant_); }
  void operator()(const Lost& lost) { node_.lost(lost); }
  void operator()(const Note& note) { node_.say(note); }

 private:
  Negotiation& node_;
  const size_t participant_;
  Span span_;
};

Negotiation::Negotiation(bool root, std::vector<RankSet> participants, size_t cache_capacity)
    : root_(root),
      participants_(std::move(participants)),
      cache_(cache_capacity),
      unheard_(participants_.count() - 1),
      waiting_(participants_.count()) {}

void Negotiation::from_child(size_t child, std::string_view message) {
  UpwardRecords::read(message, Child(*this, child));
}

void Negotiation::from_parent(std::string_view message) {
  DownwardRecords::read(message, [this](const auto& decided) { apply(decided); });
}

std::string Negotiation::take_for_parent() {
  span_.reset();
  return up_.take();
}

void Negotiation::submit(std::string_view name, std::string_view signature, const Mask& absent, std::string values) {
  if (participants_.joined[0]) {
    // The other ranks go on without this one: they count it as joined, whatever it states now.
    if (!lost_ && !is_stale(0, name, signature)) {
      after_join_.push_back({std::string(name), std::string(signature), absent});
    }
    return;
  }
  const auto id = cache_.find(name);
  if (id && cache_.at(*id).signature == signature && !by_name_.contains(name)) {
    state_id(0, *id, own_statement(absent, std::move(values)));
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
  if (root_) return apply(lost);
  up_.add(lost);
}

void Negotiation::say(const Note& note) {
  if (root_) {
    decisions_.push_back({.type = Decision::Type::said, .note = note});
  } else {
    up_.add(note);
    urgent_ = true;
  }
}

void Negotiation::announce(const Note& note) {
  down_.add(note);
  decisions_.push_back({.type = Decision::Type::announced, .note = note});
}

// For the parent's Unheard.
void Negotiation::acknowledge() {
  if (!root_) up_.add(Heard{});
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
  const ResponseCache::Tensor* const tensor = cache_.find(id);
  if (tensor == nullptr) {
    const Forgotten* const forgotten = participant > 0 ? unheard_.forgotten(participant - 1, id) : nullptr;
    if (forgotten == nullptr) throw std::runtime_error("control message: it names an unknown id");
    return state_signature(participant, forgotten->name, forgotten->signature, statement);
  }
  const auto& [name, signature] = *tensor;
  if (is_stale(participant, name, signature)) return;
  if (!by_name_.empty() && by_name_.contains(name)) return state_signature(participant, name, signature, statement);
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
  const auto& [name, signature] = cache_.at(id);
  found.mapped().to_full_request(signature);
  return by_name_.emplace(name, std::move(found.mapped())).first->second;
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
  if (said_so) up_.add(Waiting{kDoesNotWait});
}

bool Negotiation::all_wait() const {
  for (size_t i = 0; i < participants_.count(); ++i) {
    if (!participants_.joined[i] && waiting_[i] != decisions_seen_) return false;
  }
  return !lost_;
}

void Negotiation::finish_id(Id id) {
  Pending& pending = by_id_.at(id);
  if (root_) {
    const auto& [name, signature] = cache_.at(id);
    return decide(name, signature, pending.summary(), id);
  }
  pending.set_passed_up();
  pass_up(Ready{id, pending.summary()});
}

void Negotiation::finish_request(const std::string& name) {
  Pending& pending = by_name_.at(name);
  if (root_) {
    const Mismatch mismatch = find_mismatch(pending.signatures());
    if (!mismatch.text.empty()) return apply(Fail{name, mismatch.text, mismatch.families});
    const std::string signature = pending.signatures()[0].first;
    return decide(name, signature, pending.summary(), std::nullopt);
  }
  pending.set_passed_up();
  pass_up(FullRequest{name, pending.summary(), pending.signatures()});
}

template <class Record>
void Negotiation::pass_up(const Record& record) {
  const Span& span = record.statement.span;
  if (!span_ || !is_same_moment(*span_, span)) up_.add(span_.emplace(span));
  up_.add(record);
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
  if (root_) return apply(JoinDone{last_joined_});
  joined_sent_ = true;
  up_.add(Joined{last_joined_});
}

// Ranks that wait at the same point of the decision stream will not say anything more before the next decision.
void Negotiation::finish_waiting() {
  if (!all_wait()) return;
  if (!root_) return up_.add(Waiting{decisions_seen_});
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
    if (!problem.empty()) return apply(Fail{name, problem, families_of(request)});
  }
  lateness_[statement.span.last_rank].add(statement.span.seconds());
  if (id) {
    apply(Execute{*id, statement.joined.count(), statement.absent, statement.values});
  } else {
    decide_new(name, signature, statement.joined.count(), statement.absent);
  }
}

void Negotiation::decide_new(const std::string& name, const std::string& signature, int joined, const Mask& absent) {
  Id victim = 0;
  bool room = true;
  if (const auto old = cache_.find(name)) {
    apply(Forget{*old});
  } else {
    const auto space = cache_.make_room(name, victim);
    if (space == ResponseCache::Room::evict) apply(Forget{victim});
    room = space != ResponseCache::Room::none;
  }
  apply(ExecuteNew{room ? cache_.next_id() : ExecuteNew::kNotCached, name, signature, joined, absent});
}

const ResponseCache::Tensor& Negotiation::known(Id id) const {
  const ResponseCache::Tensor* const tensor = cache_.find(id);
  if (tensor == nullptr) throw std::runtime_error("control message: a decision about an id that is not cached");
  return *tensor;
}

void Negotiation::apply(const Execute& decided) {
  const auto& [name, signature] = known(decided.id);
  down_.add(decided);
  const auto pending = by_id_.extract(decided.id);
  cache_.touch(decided.id);
  execute(name, signature, !pending.empty() && pending.mapped().stated_here(), decided.joined, decided.absent,
          decided.values);
}

void Negotiation::apply(const ExecuteNew& decided) {
  down_.add(decided);
  const auto pending = by_name_.extract(std::string(decided.name));
  if (decided.id != ExecuteNew::kNotCached) cache_.insert(decided.id, decided.name, decided.signature);
  execute(decided.name, decided.signature, !pending.empty() && pending.mapped().stated_here(), decided.joined,
          decided.absent, {});
}

void Negotiation::execute(std::string_view name, std::string_view signature, bool submitted, int joined,
                          const Mask& absent, std::string_view values) {
  decisions_.push_back({.type = Decision::Type::execute,
                        .name = std::string(name),
                        .submitted = submitted,
                        .signature = submitted ? std::string{} : std::string(signature),
                        .joined_ranks = joined,
                        .absent = absent,
                        .number = ++decisions_seen_,
                        .values = std::string(values)});
}

void Negotiation::apply(const Forget& decided) {
  const Id id = decided.id;
  const auto& [name, signature] = known(id);
  down_.add(decided);
  acknowledge();
  if (!lost_) unheard_.add(Forgotten{id, name, signature});
  if (by_id_.contains(id)) to_full_request(id);
  cache_.erase(id);
}

void Negotiation::apply(const Fail& decided) {
  down_.add(decided);
  acknowledge();
  const Failed failed{std::string(decided.name), decided.families};
  if (!lost_) unheard_.add(failed);
  std::erase_if(by_id_, [&](const auto& entry) {
    const auto& [name, signature] = cache_.at(entry.first);
    return failed.ends(name, signature);
  });
  for (auto entry = by_name_.begin(); entry != by_name_.end();) {
    const auto is_stale = [&](const std::string& signature) { return failed.ends(entry->first, signature); };
    entry = entry->second.take_out(is_stale) ? std::next(entry) : by_name_.erase(entry);
  }
  std::erase_if(after_join_, [&](const HeldBack& its) { return failed.ends(its.name, its.signature); });
  decisions_.push_back({.type = Decision::Type::fail,
                        .name = failed.name,
                        .text = std::string(decided.text),
                        .families = failed.families});
  ++decisions_seen_;
  // Where ranks of a family are taken out, those that are left may be complete: the others have joined.
  if (!joined_sent_) finish_complete();
}

void Negotiation::apply(const JoinDone& decided) {
  down_.add(decided);
  participants_.joined.assign(participants_.count(), false);
  joined_sent_ = false;
  decisions_.push_back({.type = Decision::Type::join_done, .rank = decided.last_rank});
  ++decisions_seen_;
  for (const HeldBack& its : std::exchange(after_join_, {})) submit(its.name, its.signature, its.absent);
}

void Negotiation::apply(const Lost& lost) {
  if (lost_ && lost.loss <= lost_->loss && lost.finished >= finished_) return;
  down_.add(lost);
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
  for (const auto& [id, pending] : by_id_)
    lines[pending.serial()] = pending.describe(label_of(cache_.at(id).signature));
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
