#include "mpi_exit.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>

namespace horovodish {

namespace {

abi::MpiExit functions;
abi::MpiHandle world = 0;
pid_t process = 0;
std::atomic<bool> peers_are_lost{false};

void finalize(int status, void*) {
  int finalized = 0;
  if (status != 0 || peers_are_lost || getpid() != process || functions.finalized(&finalized) != abi::kMpiSuccess ||
      finalized)
    return;
  // The engine may have stopped before a rank died.
  int agreed = 1;
  if (world != 0 && functions.agree != nullptr && functions.agree(world, &agreed) != abi::kMpiSuccess) return;
  functions.finalize();
}

}  // namespace

void finalize_mpi_at_exit(const std::string& library, abi::MpiHandle tolerant_world) {
  functions.resolve(library);
  world = tolerant_world;
  process = getpid();
  on_exit(finalize, nullptr);
}

void do_not_finalize_mpi() { peers_are_lost = true; }

}  // namespace horovodish
