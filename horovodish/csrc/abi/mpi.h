// The functions of MPI that the engine calls, declared by us and looked up in the MPI library that mpi4py has loaded,
// so that one binary works with every MPI. Read from the MPI 4.1 standard, section "Language bindings", Open MPI 5.0
// and MPICH 5.0.
//
// Handles are pointers in Open MPI and ints in MPICH. Both are passed as uintptr_t: an int argument occupies the low
// half of a register on x86-64 and AArch64. Requests and statuses are opaque blocks of the sizes that mpi4py reports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace horovodish::abi {

using MpiHandle = uintptr_t;

// The tags of one start of the engine. Messages left over from an earlier start have other tags, so they are not taken
// for news. The MPI standard promises tags up to 32767.
struct MpiTags {
  static constexpr int kSlots = 8, kExchanges = 64;
  static constexpr int kPerGeneration = 2 + kSlots * kExchanges, kGenerations = 32768 / kPerGeneration;

  explicit MpiTags(int generation) : base(generation % kGenerations * kPerGeneration) {}
  int control() const { return base; }
  int transfers() const { return base + kPerGeneration - 1; }  // sends and receives
  // The tag of one exchange of a chunk of a stream. `number`: below kExchanges, see HostShards.
  int exchange(uint64_t chunk, size_t number) const {
    return base + 1 + static_cast<int>(chunk % kSlots) * kExchanges + static_cast<int>(number);
  }

  int base;
};

struct Mpi {
  // From mpi4py: its extension module's file, and handles and sizes of the MPI that it was built for or has loaded.
  std::string library;
  MpiHandle communicator = 0;
  MpiHandle byte_type = 0;
  size_t request_bytes = 0;
  size_t status_bytes = 0;
  bool tolerates_faults = false;  // ranks continue when another one dies
  std::vector<int> world_ranks;   // by rank of the communicator: the ranks in messages
  MpiTags tags{0};                // on the communicator
  std::vector<uint64_t>* sent_bytes = nullptr;  // by rank of the world: counts what this rank sends

  int (*isend)(const void* data, int count, MpiHandle type, int to, int tag, MpiHandle communicator,
               void* request) = nullptr;
  int (*issend)(const void* data, int count, MpiHandle type, int to, int tag, MpiHandle communicator,
                void* request) = nullptr;
  int (*irecv)(void* data, int count, MpiHandle type, int from, int tag, MpiHandle communicator,
               void* request) = nullptr;
  int (*test)(void* request, int* flag, void* status) = nullptr;
  int (*cancel)(void* request) = nullptr;
  int (*get_count)(const void* status, MpiHandle type, int* count) = nullptr;
  int (*error_string)(int code, char* text, int* length) = nullptr;

  // Fills the function pointers. Throws std::runtime_error with the name of the missing library or function.
  void resolve();
  // Returns whether MPI knows that this rank has died; MPI knows only if it tolerates faults. This question does not
  // let MPI discover further deaths, so the answer still holds for the next send.
  bool has_died(int rank) const;

 private:
  int (*get_failed_)(MpiHandle communicator, MpiHandle* group) = nullptr;  // null if MPI cannot tell
  int (*comm_group_)(MpiHandle communicator, MpiHandle* group) = nullptr;
  int (*group_size_)(MpiHandle group, int* size) = nullptr;
  int (*translate_ranks_)(MpiHandle from, int count, const int* ranks, MpiHandle to, int* translated) = nullptr;
  int (*group_free_)(MpiHandle* group) = nullptr;
};

// The functions for leaving MPI.
struct MpiExit {
  int (*finalized)(int* flag) = nullptr;
  int (*finalize)() = nullptr;
  // Of Open MPI's fault tolerance ULFM; null in other libraries. Waits for all ranks as finalizing does, but fails if
  // one is dead.
  int (*agree)(MpiHandle communicator, int* flag) = nullptr;

  void resolve(const std::string& library);
};

// Longest text of MPI_Error_string: 512 in MPICH, 256 in Open MPI.
inline constexpr size_t kMpiMaxErrorString = 1024;
inline constexpr int kMpiSuccess = 0;

}  // namespace horovodish::abi
