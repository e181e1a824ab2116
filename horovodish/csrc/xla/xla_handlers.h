// The native calls of XLA programs by their names, and their registration with a copy of XLA.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "abi/xla_ffi.h"

namespace horovodish {

// By their names. Platforms are "cpu" and "cuda".
std::vector<std::pair<const char*, abi::xla::Handler*>> xla_handlers(const std::string& platform);

// For frameworks that do not register handlers themselves. Once for each platform and table. Throws std::runtime_error
// where the interface is too old, or XLA refuses.
void register_xla_handlers(const abi::xla::Api& api, const std::string& platform);

}  // namespace horovodish
