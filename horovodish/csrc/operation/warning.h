// What the engine tells the user when there is no call that could raise it.
#pragma once

#include <cstdio>
#include <string>

namespace horovodish {

inline void warn(const std::string& text) { std::fprintf(stderr, "horovodish: warning: %s\n", text.c_str()); }

}  // namespace horovodish
