// Warnings to the user, for cases where no call can raise an error.
#pragma once

#include <cstdio>
#include <string>

namespace horovodish {

inline void warn(const std::string& text) { std::fprintf(stderr, "horovodish: warning: %s\n", text.c_str()); }

}  // namespace horovodish
