// How ranks are lost to each other.
#pragma once

#include <cstdint>

namespace horovodish {

enum class Loss : uint64_t {
  orderly,  // it has left with nothing under way
  failed,   // so too, but because of an error: it will not finalize MPI
  abort,    // what is being executed cannot be completed either
  stall,    // nobody has gone, but some have waited for too long
};

}  // namespace horovodish
