// How a rank leaves MPI.
#pragma once

#include <string>

#include "abi/mpi.h"

namespace horovodish {

// Calls MPI_Finalize when this process exits, provided that its status is 0. Finalizing waits for all ranks: a rank
// that ends with an error would wait for peers that wait for it, where its launcher ends the job as soon as it sees the
// rank's status. `library`: as abi::Mpi::library. `tolerant_world`: the communicator of all ranks if they outlive a dead
// one, else 0; a rank leaves without finalizing if one of them is dead. Throws std::runtime_error.
// `rank`: for a warning on stderr if finalizing takes longer than `warning_seconds`; 0: no warning.
// `patience_seconds`: see do_not_finalize_mpi_for_long().
void finalize_mpi_at_exit(const std::string& library, abi::MpiHandle tolerant_world, int rank, double warning_seconds,
                          double patience_seconds);

// A rank has died: finalizing would wait for it for ever, so this process leaves without.
void do_not_finalize_mpi();

// Ranks have waited for too long. Those that hang do not finalize, so this process ends with status 1 when it has
// waited for them for `patience_seconds`. One that left at once would make its launcher end ranks that do not hang.
void do_not_finalize_mpi_for_long();

}  // namespace horovodish
