// How a rank is lost to others.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "negotiation/wire.h"

namespace horovodish {

enum class Loss : uint64_t {
  left,     // a rank has left without an error
  failed,   // a rank has died, or leaves because of an error: it does not finalize MPI
  stall,    // no rank has gone, but some have waited for too long
  retired,  // a rank has ended its part in this process set, and goes on in others
};
template <>
inline constexpr uint64_t kEnumerators<Loss> = 4;

struct Lost {
  Loss loss = Loss::left;
  // Decisions up to this number, counted from 1, can still be carried out: the lost rank has done its part in them.
  uint64_t finished = 0;
  std::string text = {};

  static auto fields(auto& its) { return std::tie(its.loss, its.finished, its.text); }
};

}  // namespace horovodish
