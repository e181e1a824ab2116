#include "mpi_exit.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>

#include "abi/mpi.h"

namespace horovodish {

namespace {

abi::MpiExit functions;
pid_t process = 0;
std::atomic<bool> peers_are_lost{false};

void finalize(int status, void*) {
  int finalized = 0;
  if (status != 0 || peers_are_lost || getpid() != process || functions.finalized(&finalized) != abi::kMpiSuccess ||
      finalized)
    return;
  functions.finalize();
}

}  // namespace

void finalize_mpi_at_exit(const std::string& library) {
  functions.resolve(library);
  process = getpid();
  on_exit(finalize, nullptr);
}

void do_not_finalize_mpi() { peers_are_lost = true; }

}  // namespace horovodish
