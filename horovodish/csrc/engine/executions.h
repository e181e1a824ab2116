// Programs that call Python in some of their executions, so that the ranks compare their parameters.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace horovodish {

// Gets a text that describes the parameters, the address of each parameter if the program has passed them, and the
// number of the execution, from 1. The parameters stay in place until it returns.
using Comparer =
    std::function<void(std::string_view described, const std::vector<uintptr_t>& addresses, uint64_t number)>;

// Sets the function, and counts executions from 0 again. An empty function: nothing is compared.
void set_comparer(Comparer comparer);

// Whether the ranks compare their parameters in a step or an execution with this number, besides the first ones. A run
// finds out soon after its ranks have parted, and a long run compares seldom.
bool compares_at(uint64_t number);

// Counts an execution of `key`. Calls the function in the first `first_ones` executions, and whenever compares_at() is
// true. `addresses` is called only then.
void count_execution(const std::string& key, uint64_t first_ones, std::string_view described,
                     const std::function<std::vector<uintptr_t>()>& addresses);

// How many executions were counted, by key. A rank that had joined has counted fewer, so count_at_least() raises its
// numbers.
std::map<std::string, uint64_t> executions();
void count_at_least(const std::map<std::string, uint64_t>& executions);

}  // namespace horovodish
