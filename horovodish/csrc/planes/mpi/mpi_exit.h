// How a rank leaves MPI.
#pragma once

#include <string>

#include "abi/mpi.h"
#include "negotiation/loss.h"

namespace horovodish {

// Calls MPI_Finalize when this process exits, provided that its status is 0. Finalizing waits for all ranks: a rank
// that ends with an error would wait for peers that wait for it, where its launcher ends the job as soon as it sees the
// rank's status. `library`: as abi::Mpi::library. `tolerant_world`: the communicator of all ranks if they outlive a dead
// one, else 0; a rank leaves without finalizing if one of them is dead. Throws std::runtime_error.
// `rank`: for a warning on stderr if finalizing takes longer than `warning_seconds`; 0: no warning.
// `patience_seconds`: see end_without_lost_ranks().
void finalize_mpi_at_exit(const std::string& library, abi::MpiHandle tolerant_world, int rank, double warning_seconds,
                          double patience_seconds);

// From now on this process expects that the ranks that it has lost never finalize:
//   failed   finalizing would wait for them for ever, so this process leaves without
//   stall    it ends with status 1 when it has waited for them for `patience_seconds`. If it left at once, its launcher would end
//            ranks that do not hang
void end_without_lost_ranks(Loss loss);

// This process has found out at its end that it has failed: it does not finalize, and ends with status 1 instead of 0.
void fail_at_exit();

}  // namespace horovodish
