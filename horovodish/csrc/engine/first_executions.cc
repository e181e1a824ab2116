#include "engine/first_executions.h"

#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace horovodish {

namespace {

struct Executions {
  std::mutex mutex;
  Comparer comparer;                           // guarded by mutex
  std::unordered_map<std::string, int> counts;  // by key, no further than needed; guarded by mutex
};

Executions& executions_of_all() {
  static auto* const all = new Executions;  // threads of a framework may use it until the process has ended
  return *all;
}

}  // namespace

void set_comparer(Comparer comparer) {
  Executions& all = executions_of_all();
  std::lock_guard lock(all.mutex);
  all.comparer = std::move(comparer);
  all.counts.clear();
}

Comparer comparer_for(std::string_view key, int executions) {
  Executions& all = executions_of_all();
  std::lock_guard lock(all.mutex);
  if (!all.comparer) return nullptr;
  int& count = all.counts[std::string(key)];
  if (count == executions) return nullptr;
  ++count;
  return all.comparer;
}

}  // namespace horovodish
