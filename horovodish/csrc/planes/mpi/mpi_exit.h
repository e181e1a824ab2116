// How a rank leaves MPI.
#pragma once

#include <string>

#include "abi/mpi.h"
#include "negotiation/loss.h"

namespace horovodish {

// Calls MPI_Finalize when this process exits with status 0. Finalizing waits for all ranks. A rank that ends with an
// error would wait for peers that wait for it; without finalizing, its launcher ends the job as soon as it sees the
// status. `library`: as abi::Mpi::library. `tolerant_world`: the communicator of all ranks if they outlive a dead rank,
// else 0; with it, a rank leaves without finalizing if another rank is dead. `rank`: for a warning on stderr if
// finalizing takes longer than `warning_seconds`; 0: no warning. `patience_seconds`: see end_without_lost_ranks().
// Throws std::runtime_error.
void finalize_mpi_at_exit(const std::string& library, abi::MpiHandle tolerant_world, int rank, double warning_seconds,
                          double patience_seconds);

// From now on this process expects that the lost ranks never finalize. Failed: finalizing would wait for them for ever,
// so this process leaves without it. Stall: this process ends with status 1 after it has waited for them for
// `patience_seconds`. If it left at once, its launcher would end ranks that do not hang.
void end_without_lost_ranks(Loss loss);

// At its end this process has found that it failed: it does not finalize, and ends with status 1 instead of 0.
void fail_at_exit();

}  // namespace horovodish
