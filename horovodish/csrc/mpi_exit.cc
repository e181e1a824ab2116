#include "mpi_exit.h"

#include <stdlib.h>
#include <unistd.h>

#include "abi/mpi.h"

namespace horovodish {

namespace {

abi::MpiExit functions;
pid_t process = 0;

void finalize(int status, void*) {
  int finalized = 0;
  if (status != 0 || getpid() != process || functions.finalized(&finalized) != abi::kMpiSuccess || finalized) return;
  functions.finalize();
}

}  // namespace

void finalize_mpi_at_exit(const std::string& library) {
  functions.resolve(library);
  process = getpid();
  on_exit(finalize, nullptr);
}

}  // namespace horovodish
