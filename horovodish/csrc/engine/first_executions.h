// Programs that call Python when they are executed for the first times, so that the ranks compare their parameters.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace horovodish {

// Gets a text that describes the parameters, and where each of them begins, if the program has passed them. They are there until
// it returns.
using Comparer = std::function<void(std::string_view described, const std::vector<uintptr_t>& addresses)>;

// Sets the function, and counts executions from 0 again. An empty function: nothing is compared.
void set_comparer(Comparer comparer);

// Counts an execution of `key`. Returns the function if there have been no more than `executions`, else an empty one.
Comparer comparer_for(std::string_view key, int executions);

}  // namespace horovodish
