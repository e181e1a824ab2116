#include "negotiation/negotiation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <stdexcept>

#include "negotiation/request.h"

namespace horovodish {

namespace {

constexpr size_t kShownTensors = 5;  // in a message about tensors that wait
// Statements made within this time of each other count as simultaneous, so they share one Span.
constexpr double kMomentSeconds = 1e-4;

bool is_same_moment(const Span& a, const Span& b) {
  return a.last_rank == b.last_rank && std::abs(a.first_seconds - b.first_seconds) < kMomentSeconds &&
         std::abs(a.last_seconds - b.last_seconds) < kMomentSeconds;
}

}  // namespace

void Lateness::add(double seconds) {
  ++times_last;
  total_seconds += seconds;
  longest_seconds = std::max(longest_seconds, seconds);
}

// A child's statements about its subtree count for its participant. Its messages about single ranks are for the root.
class Negotiation::Child {
 public:
  Child(Negotiation& node, size_t participant) : node_(node), participant_(participant) {}

  void operator()(const Span& span) {
    // Another host's clock may be ahead of ours.
    const double ahead = std::max(span.last_seconds - node_.now_, 0.0);
    span_ = {span.last_rank, span.first_seconds - ahead, span.last_seconds - ahead};
  }
  void operator()(Ready& ready) {
    if (!ready.statement.joined.empty()) {
      RankSet ranks = node_.participants_.ranks[participant_];
      ranks.remove(ready.statement.joined);
      if (ranks.empty()) throw std::runtime_error("control message: a request without ranks");
    }
    ready.statement.span = span_;
    node_.state_id(participant_, ready.id, ready.statement);
  }
  void operator()(FullRequest request) {
    const auto is_of_nobody = [](const auto& its) { return its.second.empty(); };
    if (request.signatures.empty() || std::ranges::any_of(request.signatures, is_of_nobody)) {
      throw std::runtime_error("control message: a request without ranks");
    }
    request.statement.span = span_;
    node_.state_request(participant_, request.name, std::move(request.signatures), request.statement);
  }
  void operator()(const Joined& joined) { node_.state_joined(participant_, joined.last_rank); }
  void operator()(const Acknowledgement&) {
    if (!node_.lost_) node_.unacknowledged_.acknowledged_by(participant_ - 1);
  }
  void operator()(const Lost& lost) { node_.lost(lost); }
  void operator()(const Note& note) { node_.note_to_root(note); }

 private:
  Negotiation& node_;
  const size_t participant_;
  Span span_;
};

Negotiation::Negotiation(bool root, std::vector<RankSet> participants, size_t cache_capacity)
    : root_(root),
      participants_(std::move(participants)),
      tensors_(cache_capacity),
      unacknowledged_(participants_.count() - 1) {}

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
  if (participants_.joined & bit_of(0)) {
    // The other ranks go on without this rank: they count it as joined, whatever it states now.
    if (!lost_ && !is_stale(0, name, signature)) {
      after_join_.push_back({std::string(name), std::string(signature), absent});
    }
    return;
  }
  const Tensor* const tensor = tensors_.find(name);
  if (const CachedRequest* const request = tensor != nullptr ? tensor->find(signature) : nullptr) {
    state_id(0, *request, own_statement(absent, std::move(values)));
  } else {
    ++full_requests_;
    state_signature(0, name, signature, own_statement(absent));
  }
}

void Negotiation::join() { state_joined(0, own_rank()); }

void Negotiation::lost(const Lost& lost) {
  if (root_) return apply(lost);
  up_.add(lost);
}

void Negotiation::note_to_root(const Note& note) {
  if (root_) {
    decisions_.emplace_back(note);
  } else {
    up_.add(note);
    urgent_ = true;
  }
}

void Negotiation::note_to_all(const Note& note) {
  down_.add(note);
  decisions_.emplace_back(note);
}

// For the parent's UnacknowledgedDecisions.
void Negotiation::acknowledge() {
  if (!root_) up_.add(Acknowledgement{});
}

std::optional<Decision> Negotiation::take_decision() {
  if (decisions_.empty()) return std::nullopt;
  std::optional<Decision> oldest = std::move(decisions_[taken_++]);
  if (taken_ == decisions_.size()) {
    decisions_.clear();
    taken_ = 0;
  }
  return oldest;
}

bool Negotiation::is_stale(size_t participant, std::string_view name, std::string_view signature) const {
  if (participant > 0) return unacknowledged_.has_failed(participant - 1, name, signature);
  return std::ranges::any_of(std::span(decisions_).subspan(taken_), [&](const Decision& decision) {
    const Fail* const failed = std::get_if<Fail>(&decision);
    return failed != nullptr && failed->ends(name, signature);
  });
}

void Negotiation::state_id(size_t participant, TensorId id, const Statement& statement) {
  if (lost_) return;
  if (const CachedRequest* const request = tensors_.find(id)) return state_id(participant, *request, statement);
  const Forgotten* const forgotten = participant > 0 ? unacknowledged_.forgotten(participant - 1, id) : nullptr;
  if (forgotten == nullptr) throw std::runtime_error("control message: it names an unknown id");
  state_signature(participant, forgotten->name, forgotten->signature, statement);
}

void Negotiation::state_id(size_t participant, const CachedRequest& request, const Statement& statement) {
  Tensor& tensor = *request.tensor;
  if (tensor.pending.has_another_id(request)) {
    return state_signature(participant, tensor.name, request.signature, statement);
  }
  if (lost_ || is_stale(participant, tensor.name, request.signature)) return;
  tensors_.open(tensor).state_by_id(participant, request, statement);
  if (tensor.pending.complete(participants_)) finish(tensor);
}

void Negotiation::state_signature(size_t participant, std::string_view name, std::string_view signature,
                                  const Statement& statement) {
  RankSet ranks = participants_.ranks[participant];
  ranks.remove(statement.joined);
  state_request(participant, name, {{std::string(signature), std::move(ranks)}}, statement);
}

void Negotiation::state_request(size_t participant, std::string_view name, Signatures signatures,
                                const Statement& statement) {
  if (lost_) return;
  const size_t stale =
      std::erase_if(signatures, [&](const auto& its) { return is_stale(participant, name, its.first); });
  if (signatures.empty()) return;
  Tensor& tensor = tensors_.open(name);
  tensor.pending.state_in_full(participant, statement, signatures, stale == 0);
  if (tensor.pending.complete(participants_)) finish(tensor);
}

void Negotiation::state_joined(size_t participant, WorldRank last_rank) {
  if (lost_) return;
  participants_.joined |= bit_of(participant);
  last_joined_ = last_rank;
  finish_complete();
  finish_joined();
}

void Negotiation::finish(Tensor& tensor) {
  Pending& pending = tensor.pending;
  Statement statement = pending.summary(participants_);
  const CachedRequest* const request = pending.by_one_id();
  if (request == nullptr) statement.values.clear();
  if (root_) return decide(tensor, std::move(statement));
  pending.set_passed_up();
  if (request != nullptr) return pass_up(Ready{request->id, std::move(statement)});
  pass_up(FullRequest{tensor.name, std::move(statement), pending.signatures(participants_)});
}

template <class Record>
void Negotiation::pass_up(const Record& record) {
  const Span& span = record.statement.span;
  if (!span_ || !is_same_moment(*span_, span)) up_.add(span_.emplace(span));
  up_.add(record);
}

void Negotiation::finish_complete() {
  // A tensor that fails may end other tensors, or leave them without some of their ranks.
  for (const std::string& name : tensors_.pending()) {
    Tensor* const tensor = tensors_.find(name);
    if (tensor != nullptr && tensor->pending.any() && tensor->pending.complete(participants_)) finish(*tensor);
  }
}

void Negotiation::finish_joined() {
  if (joined_sent_ || participants_.joined != participants_.all()) return;
  if (root_) return apply(Joined{last_joined_});
  joined_sent_ = true;
  up_.add(Joined{last_joined_});
}

// At the root: every rank has submitted the tensor or has joined.
void Negotiation::decide(const Tensor& tensor, Statement statement) {
  const CachedRequest* request = tensor.pending.by_one_id();
  Signatures signatures;
  if (request == nullptr) {
    signatures = tensor.pending.signatures(participants_);
    const Fail mismatch = find_mismatch(tensor.name, signatures);
    if (!mismatch.text.empty()) return apply(mismatch);
    request = tensor.find(signatures[0].first);
  }
  const std::string& signature = request != nullptr ? request->signature : signatures[0].first;
  if (fails_because_of_joined(tensor.name, signature, statement.joined)) return;
  lateness_[statement.span.last_rank].add(statement.span.seconds());
  const int joined = statement.joined.count();
  if (request != nullptr) {
    return apply(Execute{request->id, joined, std::move(statement.absent), std::move(statement.values)});
  }
  const std::optional<TensorId> victim = tensors_.make_room(tensor, signature);
  if (victim.value_or(kNotCached) != kNotCached) apply(Forget{*victim});
  const TensorId id = victim ? tensors_.next_id() : kNotCached;
  apply(ExecuteNew{id, std::string(tensor.name), signature, joined, std::move(statement.absent)});
}

// At the root.
bool Negotiation::fails_because_of_joined(std::string_view name, std::string_view signature, const RankSet& joined) {
  if (joined.empty()) return false;
  const Request request = Request::decode(signature);
  Fail failed{std::string(name), request.problem_with_joined(joined)};
  if (failed.text.empty()) return false;
  if (!request.family.name.empty()) failed.families.push_back(request.family.name);
  apply(failed);
  return true;
}

CachedRequest& Negotiation::known(TensorId id) {
  CachedRequest* const request = tensors_.find(id);
  if (request == nullptr) throw std::runtime_error("control message: a decision about an id that is not cached");
  return *request;
}

void Negotiation::apply(const Execute& decided) {
  CachedRequest& request = known(decided.id);
  Tensor& tensor = *request.tensor;
  down_.add(decided);
  const bool submitted = tensor.pending.stated_here();
  tensors_.close(tensor);
  tensors_.touch(request);
  execute(tensor.name, request.signature, submitted, decided.joined, decided.absent, decided.values);
}

void Negotiation::apply(const ExecuteNew& decided) {
  down_.add(decided);
  Tensor* const tensor = tensors_.find(decided.name);
  const bool submitted = tensor != nullptr && tensor->pending.stated_here();
  if (decided.id != kNotCached) tensors_.insert(decided.id, decided.name, decided.signature);
  // Closed after the insertion, so that the tensor keeps its place in memory.
  if (tensor != nullptr) tensors_.close(*tensor);
  execute(decided.name, decided.signature, submitted, decided.joined, decided.absent, {});
}

void Negotiation::execute(std::string_view name, std::string_view signature, bool submitted, int joined,
                          const Mask& absent, std::string_view values) {
  decisions_.emplace_back(DecidedCollective{std::string(name), submitted ? std::string{} : std::string(signature),
                                            joined, absent, std::string(values), ++decisions_seen_});
}

void Negotiation::apply(const Forget& decided) {
  CachedRequest& request = known(decided.id);
  down_.add(decided);
  acknowledge();
  if (!lost_) unacknowledged_.add(Forgotten{request.id, std::string(request.tensor->name), request.signature});
  request.tensor->pending.forget(request, participants_);
  tensors_.forget(request);
}

void Negotiation::apply(const Fail& decided) {
  down_.add(decided);
  acknowledge();
  if (!lost_) unacknowledged_.add(decided);
  for (const std::string& name : tensors_.pending()) {
    Tensor& tensor = *tensors_.find(name);
    const auto has_failed = [&](std::string_view signature) { return decided.ends(name, signature); };
    if (!tensor.pending.remove_failed(has_failed, participants_)) tensors_.close(tensor);
  }
  std::erase_if(after_join_, [&](const HeldBack& its) { return decided.ends(its.name, its.signature); });
  decisions_.emplace_back(decided);
  ++decisions_seen_;
  // The statements that are left may be complete: the other ranks have joined.
  if (!joined_sent_) finish_complete();
}

void Negotiation::apply(const Joined& joined) {
  down_.add(joined);
  participants_.joined = 0;
  joined_sent_ = false;
  decisions_.emplace_back(joined);
  ++decisions_seen_;
  for (const HeldBack& its : std::exchange(after_join_, {})) submit(its.name, its.signature, its.absent);
}

void Negotiation::apply(const Lost& lost) {
  if (lost_ && lost.loss <= lost_->loss && lost.finished >= lost_->finished) return;
  down_.add(lost);
  for (const std::string& name : tensors_.pending()) tensors_.close(*tensors_.find(name));
  unacknowledged_.clear();
  after_join_.clear();
  if (!lost_) lost_ = lost;
  lost_->finished = std::min(lost_->finished, lost.finished);
  decisions_.emplace_back(Lost{lost.loss, lost_->finished, lost.text});
}

bool Negotiation::any_joined() const { return !lost_ && participants_.joined != 0; }

std::optional<uint64_t> Negotiation::oldest() const {
  const auto names = tensors_.pending();
  if (names.empty()) return std::nullopt;
  return tensors_.find(names[0])->pending.serial();
}

std::vector<Negotiation::Awaited> Negotiation::awaited() const {
  std::vector<Awaited> found;
  for (const std::string& name : tensors_.pending()) {
    if (found.size() == kShownTensors) return found;
    const Pending& pending = tensors_.find(name)->pending;
    found.push_back({name, pending.signatures(participants_)[0].first, pending.submitted(participants_),
                     pending.missing(participants_), pending.since_seconds()});
  }
  if (any_joined()) {
    found.push_back({"", "", participants_.ranks_of(participants_.joined),
                     participants_.ranks_of(participants_.all() & ~participants_.joined), 0});
  }
  return found;
}

std::string Negotiation::describe_pending(const std::map<std::string, std::string>& labels) const {
  const auto called = [&](const Awaited& its) {
    if (its.signature.empty()) return std::string("join() was called");
    const auto label = labels.find(its.name);
    return (label != labels.end() ? label->second : label_of(its.signature)) + " was submitted";
  };
  std::string text;
  for (const Awaited& its : awaited()) {
    text +=
        (text.empty() ? "" : "; ") + called(its) + " by " + its.submitted.text() + " but not by " + its.missing.text();
  }
  const size_t pending = tensors_.pending().size();
  const size_t more = pending - std::min(pending, kShownTensors);
  return more == 0 ? text : text + "; and " + std::to_string(more) + " more";
}

}  // namespace horovodish
