// Programs that call Python now and then when they are executed, so that the ranks compare their parameters.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace horovodish {

// Gets a text that describes the parameters, where each of them begins, if the program has passed them, and the number of the
// execution, from 1. They are there until it returns.
using Comparer =
    std::function<void(std::string_view described, const std::vector<uintptr_t>& addresses, uint64_t number)>;

// Sets the function, and counts executions from 0 again. An empty function: nothing is compared.
void set_comparer(Comparer comparer);

// Counts an execution of `key`, and calls the function in the first ones and whenever the number is a power of 4. `addresses` is
// called only then.
void count_execution(const std::string& key, uint64_t first_ones, std::string_view described,
                     const std::function<std::vector<uintptr_t>()>& addresses);

// How many executions were counted, by key; and counts no fewer from now on. A rank that had joined has counted fewer.
std::map<std::string, uint64_t> executions();
void count_at_least(const std::map<std::string, uint64_t>& executions);

}  // namespace horovodish
