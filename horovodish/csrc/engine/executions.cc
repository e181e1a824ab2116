#include "engine/executions.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <utility>

namespace horovodish {

namespace {

struct Executions {
  std::mutex mutex;
  Comparer comparer;                       // guarded by mutex
  std::map<std::string, uint64_t> counts;  // by key; guarded by mutex
};

Executions& executions_of_all() {
  static auto* const all = new Executions;  // threads of a framework may use it until the process has ended
  return *all;
}

// From here on, the ranks compare after this many steps. A checksum of 1 GB takes 0.2 to 1 s.
constexpr uint64_t kLongestPause = 1024;

}  // namespace

bool compares_at(uint64_t number) {
  const bool is_power_of_4 = std::has_single_bit(number) && std::countr_zero(number) % 2 == 0;
  return is_power_of_4 || (number > 0 && number % kLongestPause == 0);
}

void set_comparer(Comparer comparer) {
  Executions& all = executions_of_all();
  std::lock_guard lock(all.mutex);
  all.comparer = std::move(comparer);
  all.counts.clear();
}

void count_execution(const std::string& key, uint64_t first_ones, std::string_view described,
                     const std::function<std::vector<uintptr_t>()>& addresses) {
  Executions& all = executions_of_all();
  Comparer comparer;
  uint64_t number = 0;
  {
    std::lock_guard lock(all.mutex);
    if (!all.comparer) return;
    number = ++all.counts[key];
    if (number > first_ones && !compares_at(number)) return;
    comparer = all.comparer;
  }
  comparer(described, addresses(), number);
}

std::map<std::string, uint64_t> executions() {
  Executions& all = executions_of_all();
  std::lock_guard lock(all.mutex);
  return all.counts;
}

void count_at_least(const std::map<std::string, uint64_t>& executions) {
  Executions& all = executions_of_all();
  std::lock_guard lock(all.mutex);
  for (const auto& [key, count] : executions) all.counts[key] = std::max(all.counts[key], count);
}

}  // namespace horovodish
