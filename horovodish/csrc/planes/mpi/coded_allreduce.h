// An allreduce of floating-point values between hosts that sends codes.
//
// The range is cut into pieces, and each piece into a part for each host. A rank encodes its values of another host's
// part and sends the code to that host. That host decodes the codes, adds the values in float32 in the order of hosts,
// and encodes the sum once. It sends this code to all hosts. Every host uses the decoded values, also the host that
// made them, so every rank gets the same bits.
//
//     two hosts, a lag of 1      host 0 sends    c(0)  c(1)  r(0)  c(2)  r(1)  r(2)
//     c: contributions, r: results of a piece
//
// Several pieces are under way, so encoding, sending and adding overlap. The messages from one rank to another have a
// fixed order, so one tag is enough. Errors of encoding are kept by element, see planes/residuals.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "arithmetic/codecs/codec.h"
#include "arithmetic/reduce.h"
#include "operation/operation.h"
#include "planes/fusion.h"
#include "planes/mpi/schedule_run.h"

namespace horovodish {

// How values are encoded for the other hosts.
struct Coding {
  Codec codec;
  uint64_t seed;  // of random numbers
  Trace trace;  // of the operation
};

// `values`: ranges of the concatenation, which outlives the task. `memory` holds them and the results.
std::unique_ptr<MpiTask> make_coded_allreduce(const MpiEnvironment& environment, const Coding& coding,
                                              const Concatenation& concatenation, Range values, const Scaling& scaling,
                                              std::byte* memory);

}  // namespace horovodish
