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

bool Families::admit(const std::shared_ptr<Operation>& operation) {
  const Family& family = operation->request->family;
  if (family.name.empty()) return true;
  const auto refused = refused_.find(family.name);
  if (refused != refused_.end() && refused->second != family.run) {
    held_[family.name].push_back(operation);
    return false;
  }
  if (!operation->request->refusal.empty()) refused_[family.name] = family.run;
  return true;
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

void Families::claim_name(const Operation& operation) {
  const Request& request = *operation.request;
  if (!request.family.name.empty() && request.refusal.empty()) names_[request.name] = &operation;
}

void Families::release_name(const Operation& operation) {
  const auto found = names_.find(operation.request->name);
  if (found != names_.end() && found->second == &operation) names_.erase(found);
}

}  // namespace horovodish
