#include "engine/operation_table.h"

#include <algorithm>
#include <utility>

namespace horovodish {

void OperationTable::submit(const Pointer& operation) {
  const Request& request = *operation->request;
  if (const Error* const error = failure_of(request.family)) return owner_.settle(operation, error);
  if (request.kind == Kind::join) {
    join_ = operation;
    return owner_.state(operation);
  }
  if (wait_for_family(operation)) return;
  if (request.refusal.empty() && names_in_use_.contains(request.name)) {
    // The other ranks may wait for it.
    const std::string why = subject_of(request) + " on " + text_of(rank_) + ": " + kNameInUse;
    submit(refusal_of(request.kind, request.name, process_set_, why));
    const Error error{ErrorKind::duplicate_name, kNameInUse};
    return owner_.settle(operation, &error);
  }
  if (undecided_.contains(request.name)) {
    queued_by_name_[request.name].push_back(operation);
    return;
  }
  if (request.refusal.empty()) names_in_use_[request.name] = operation.get();
  undecided_.emplace(request.name, operation);
  owner_.state(operation);
}

bool OperationTable::wait_for_family(const Pointer& operation) {
  const Family& family = operation->request->family;
  if (family.name.empty()) return false;
  const auto refused = refused_runs_.find(family.name);
  if (refused != refused_runs_.end() && refused->second != family.run) {
    waiting_for_family_[family.name].push_back(operation);
    return true;
  }
  if (!operation->request->refusal.empty()) refused_runs_[family.name] = family.run;
  return false;
}

void OperationTable::end_join(WorldRank last) noexcept {
  const Pointer join = std::exchange(join_, nullptr);
  join->handle->last_joined = number_of(last);
  owner_.settle(join, nullptr);
}

OperationTable::Pointer OperationTable::begin(const std::string& name, uint64_t decision) {
  const auto found = undecided_.find(name);
  if (found == undecided_.end()) throw unexpected(name);
  Pointer operation = found->second;
  operation->decision = decision;
  executing_.emplace(decision, operation);
  undecided_.erase(found);
  return operation;
}

std::logic_error OperationTable::unexpected(const std::string& name) {
  return std::logic_error(
      "internal error: '" + name +
      "' was decided although this rank has neither submitted it nor joined. Remedy: report this to "
      "the authors of horovodish.");
}

void OperationTable::submit_next(const std::string& name) {
  for (auto queued = queued_by_name_.find(name); queued != queued_by_name_.end() && !undecided_.contains(name);
       queued = queued_by_name_.find(name)) {
    const Pointer next = std::move(queued->second.front());
    queued->second.pop_front();
    if (queued->second.empty()) queued_by_name_.erase(queued);
    owner_.submit_again(next);
  }
}

void OperationTable::fail(const std::string& name, const std::string& text, const std::vector<std::string>& families) {
  const Error together{ErrorKind::mismatch, "it failed together with '" + name + "': " + text};
  for (const std::string& family : families) fail_family(family, name, together);
  fail_one(name, {ErrorKind::mismatch, text});
  for (const std::string& family : families) {
    auto waiting = waiting_for_family_.extract(family);
    if (waiting.empty()) continue;
    for (const Pointer& operation : waiting.mapped()) owner_.submit_again(operation);
  }
}

// Fails the other operations of the family that this rank has submitted, and those that it submits later in the same
// run.
void OperationTable::fail_family(const std::string& family, const std::string& name, const Error& error) {
  refused_runs_.erase(family);
  std::vector<std::string> names;
  for (const auto& [its_name, operation] : undecided_) {
    if (operation->request->family.name != family) continue;
    end_run(operation->request->family, error);
    if (its_name != name) names.push_back(its_name);
  }
  for (const std::string& its_name : names) fail_one(its_name, error);
}

void OperationTable::fail_one(const std::string& name, const Error& error) {
  if (const auto found = undecided_.extract(name); !found.empty()) end(found.mapped(), &error);
  submit_next(name);
}

// Frees the names of the run at once, also the names of executing operations.
void OperationTable::end_run(const Family& family, const Error& error) {
  if (failure_of(family) != nullptr) return;
  failed_runs_.push_front({family.name, family.run, error});
  if (failed_runs_.size() > kRemembered) failed_runs_.pop_back();
  std::erase_if(names_in_use_, [&](const auto& entry) {
    const Family& its = entry.second->request->family;
    return its.run == family.run && its.name == family.name;
  });
}

std::vector<std::pair<std::string, std::string>> OperationTable::labels() const {
  constexpr size_t kMost = 16;  // a report shows fewer
  std::vector<std::pair<std::string, std::string>> labels;
  for (const auto& [name, operation] : undecided_) {
    const auto& members = operation->request->members;
    if (labels.size() < kMost && !members.empty() && !members[0].label.empty()) {
      labels.emplace_back(name, label_of(*operation->request));
    }
  }
  return labels;
}

std::vector<const Operation*> OperationTable::oldest_undecided(size_t most) const {
  std::vector<const Operation*> found;
  for (const auto& [name, operation] : undecided_) found.push_back(operation.get());
  std::ranges::sort(found, {}, &Operation::since);
  found.resize(std::min(found.size(), most));
  return found;
}

const Error* OperationTable::failure_of(const Family& family) const {
  const auto found = std::ranges::find_if(
      failed_runs_, [&](const FailedRun& failed) { return failed.run == family.run && failed.family == family.name; });
  return found == failed_runs_.end() ? nullptr : &found->error;
}

void OperationTable::end(const Pointer& operation, const Error* error) noexcept {
  executing_.erase(operation->decision);
  const auto name = names_in_use_.find(operation->request->name);
  if (name != names_in_use_.end() && name->second == operation.get()) names_in_use_.erase(name);
  owner_.settle(operation, error);
}

void OperationTable::abandon_undecided(const Error& error) noexcept {
  names_in_use_.clear();
  for (const auto& [name, operation] : std::exchange(undecided_, {})) owner_.settle(operation, &error);
  for (const auto& [name, operations] : std::exchange(queued_by_name_, {})) {
    for (const Pointer& operation : operations) owner_.settle(operation, &error);
  }
  for (const auto& [family, operations] : std::exchange(waiting_for_family_, {})) {
    for (const Pointer& operation : operations) owner_.settle(operation, &error);
  }
  if (const Pointer join = std::exchange(join_, nullptr)) owner_.settle(join, &error);
}

void OperationTable::abandon_executing(const Error& error) noexcept {
  for (const auto& [number, operation] : std::exchange(executing_, {})) end(operation, &error);
}

}  // namespace horovodish
