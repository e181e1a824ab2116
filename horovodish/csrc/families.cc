#include "families.h"

#include <algorithm>
#include <utility>

namespace horovodish {

const Error* Families::failure_of(const Family& family) const {
  const auto found = std::find_if(failed_runs_.begin(), failed_runs_.end(), [&](const FailedRun& failed) {
    return failed.run == family.run && failed.family == family.name;
  });
  return found == failed_runs_.end() ? nullptr : &found->error;
}

bool Families::take_up(const std::shared_ptr<Operation>& operation) {
  const Family& family = operation->request->family;
  if (family.name.empty()) return true;
  const auto refused = refused_.find(family.name);
  if (refused != refused_.end() && refused->second != family.run) {
    held_[family.name].push_back(operation);
    return false;
  }
  if (!operation->request->refusal.empty()) refused_[family.name] = family.run;
  if (const auto failures = failures_.find(family.name); failures != failures_.end()) {
    const auto request = std::make_shared<Request>(*operation->request);
    request->family.attempt = failures->second;
    operation->signature = std::make_shared<const std::string>(request->signature());
    operation->request = request;
  }
  return true;
}

void Families::count_failure(const std::string& family) {
  ++failures_[family];
  refused_.erase(family);
}

void Families::end_run(const Family& family, const Error& error) {
  if (failure_of(family) != nullptr) return;
  failed_runs_.push_front({family.name, family.run, error});
  if (failed_runs_.size() > kRemembered) failed_runs_.pop_back();
  std::erase_if(names_, [&](const auto& entry) {
    const Family& its = entry.second->request->family;
    return its.run == family.run && its.name == family.name;
  });
}

Families::Operations Families::take_held(const std::string& family) {
  auto held = held_.extract(family);
  return held.empty() ? Operations{} : std::move(held.mapped());
}

Families::Operations Families::take_all_held() {
  Operations all;
  for (auto& [family, operations] : std::exchange(held_, {}))
    all.insert(all.end(), operations.begin(), operations.end());
  return all;
}

void Families::claim_name(const Operation& operation) {
  const Request& request = *operation.request;
  if (!request.family.name.empty() && request.refusal.empty()) names_[request.name] = &operation;
}

void Families::release_name(const Operation& operation) {
  const auto found = names_.find(operation.request->name);
  if (found != names_.end() && found->second == &operation) names_.erase(found);
}

}  // namespace horovodish
