// An allreduce of floating-point values between hosts in which codes travel.
//
// The range is cut into pieces, and each piece into a part for each host. A rank encodes its values of the other hosts' parts and
// sends each code to that host. There they are decoded and added in float32, in the order of hosts, and the sum is encoded once. The code of the
// sum goes to all, and all use what it decodes to, also the rank that made it, so every rank gets the same bits.
//
//     two hosts, a lag of 1      host 0 sends    c(0)  c(1)  r(0)  c(2)  r(1)  r(2)
//     c: contributions, r: results of a piece
//
// Several pieces are under way, so encoding, sending and adding overlap. What a rank sends to another one comes in a fixed order,
// so one tag is enough. What encoding leaves out is kept by element, see planes/residuals.h.
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

// `values`: of the concatenation, which outlives the task. They lie in `memory`, and so do the results.
std::unique_ptr<MpiTask> make_coded_allreduce(const MpiEnvironment& environment, const Coding& coding,
                                              const Concatenation& concatenation, Range values, const Scaling& scaling,
                                              std::byte* memory);

}  // namespace horovodish
