// Python's door to the engine, in parts: module.cc opens it, and each other file makes a part of the module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "negotiation/negotiation.h"

namespace horovodish {

void bind_engine(pybind11::module_& module);
// Parts of the engine without I/O, for its tests.
void bind_testing(pybind11::module_& module);

// By rank: how often it was last, and the seconds that it was behind, in total and at most.
using LatenessTable = std::map<int, std::tuple<uint64_t, double, double>>;
LatenessTable lateness_table(const std::map<int, Lateness>& by_rank);

}  // namespace horovodish
