// The extension module, in parts: module.cc defines it, and each other file adds a part.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <tuple>

#include "negotiation/negotiation.h"

namespace horovodish {

void bind_engine(nanobind::module_& module);
void bind_exits(nanobind::module_& module);
// Parts of the engine without I/O, for its tests.
void bind_testing(nanobind::module_& module);

// By rank: how often it was last, and how many seconds it was behind, in total and at most.
using LatenessTable = std::map<int, std::tuple<uint64_t, double, double>>;
LatenessTable lateness_table(const std::map<WorldRank, Lateness>& by_rank);

}  // namespace horovodish
