// How ranks are lost to each other.
#pragma once

#include <cstdint>
#include <string>

#include "negotiation/wire.h"

namespace horovodish {

enum class Loss : uint64_t {
  left,    // a rank has left in order
  failed,  // a rank has died, or leaves because of an error: it does not finalize MPI
  stall,   // nobody has gone, but some have waited for too long
};
inline constexpr uint64_t kLosses = 3;

struct Lost {
  Loss loss = Loss::left;
  // Decisions up to this number, counted from 1, can still be carried out: the rank has done its part in them.
  uint64_t finished = 0;
  std::string text = {};

  void encode(Writer& writer) const {
    writer.number(static_cast<uint64_t>(loss));
    writer.number(finished);
    writer.text(text);
  }
  static Lost decode(Reader& reader) {
    const auto loss = static_cast<Loss>(reader.number_below(kLosses));
    const uint64_t finished = reader.number();
    return {loss, finished, std::string(reader.text())};
  }
};

}  // namespace horovodish
