#include "planes/mpi/mpi_exit.h"

#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <thread>

namespace horovodish {

namespace {

abi::MpiExit functions;
abi::MpiHandle world = 0;
pid_t process = 0;
std::atomic<bool> peers_are_lost{false};
std::atomic<bool> has_stalled{false};
std::atomic<bool> has_left{false};  // MPI, in either way; later steps may take their time
int own_rank = 0;
std::chrono::duration<double> warning{0};
std::chrono::duration<double> patience{0};

// MPI does not say which ranks it waits for.
void warn_if_it_takes_long() {
  if (warning.count() <= 0) return;
  std::thread([] {
    std::this_thread::sleep_for(warning);
    if (has_left) return;
    std::fprintf(
        stderr,
        "horovodish: warning: rank %d has ended its script and has waited in MPI_Finalize for %.0f s: another rank "
        "has not ended its script, or is stopped.\n",
        own_rank, warning.count());
  }).detach();
}

void end_if_it_takes_long() {
  std::thread([] {
    std::this_thread::sleep_for(patience);
    if (has_left) return;
    std::fprintf(
        stderr,
        "horovodish: rank %d has ended its script after a StallError, and another rank has not ended its script "
        "within %.0f s: rank %d no longer waits for that rank.\n",
        own_rank, patience.count(), own_rank);
    std::fflush(nullptr);
    _exit(1);
  }).detach();
}

void finalize(int status, void*) {
  int finalized = 0;
  if (status != 0 || peers_are_lost || getpid() != process || functions.finalized(&finalized) != abi::kMpiSuccess ||
      finalized)
    return;
  std::signal(SIGTERM, SIG_DFL);  // SIGTERM can end a rank that waits for others
  try {
    has_stalled ? end_if_it_takes_long() : warn_if_it_takes_long();
  } catch (const std::exception&) {  // the system refuses the thread
    if (has_stalled) return;
  }
  // The engine may have stopped before a rank died.
  int agreed = 1;
  const bool asks = world != 0 && functions.agree != nullptr;
  if (!asks || functions.agree(world, &agreed) == abi::kMpiSuccess) functions.finalize();
  has_left = true;
}

}  // namespace

void finalize_mpi_at_exit(const std::string& library, abi::MpiHandle tolerant_world, int rank, double warning_seconds,
                          double patience_seconds) {
  functions.resolve(library);
  world = tolerant_world;
  own_rank = rank;
  warning = std::chrono::duration<double>(warning_seconds);
  patience = std::chrono::duration<double>(patience_seconds);
  process = getpid();
  on_exit(finalize, nullptr);
}

// The last registered handler runs first.
void fail_at_exit() {
  static const pid_t failed = getpid();
  on_exit(
      [](int status, void*) {
        if (status != 0 || getpid() != failed) return;
        std::fflush(nullptr);
        _exit(1);
      },
      nullptr);
}

void end_without_lost_ranks(Loss loss) {
  if (loss == Loss::failed) peers_are_lost = true;
  if (loss == Loss::stall) has_stalled = true;
}

}  // namespace horovodish
