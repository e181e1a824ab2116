#include "abi/mpi.h"

#include "abi/library.h"

namespace horovodish::abi {

namespace {
void* find_loaded(const std::string& library) {
  void* loaded = dlopen(library.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (loaded == nullptr) throw std::runtime_error("mpi4py's extension module is not loaded: " + library);
  return loaded;
}

constexpr const char* kName = "the loaded MPI library";
}  // namespace

void Mpi::resolve() {
  void* const loaded = find_loaded(library);
  const Library mpi(loaded, kName);
  isend = mpi.look_up("MPI_Isend");
  issend = mpi.look_up("MPI_Issend");
  irecv = mpi.look_up("MPI_Irecv");
  test = mpi.look_up("MPI_Test");
  cancel = mpi.look_up("MPI_Cancel");
  get_count = mpi.look_up("MPI_Get_count");
  error_string = mpi.look_up("MPI_Error_string");
  if (tolerates_faults) get_failed_ = reinterpret_cast<decltype(get_failed_)>(dlsym(loaded, "MPIX_Comm_get_failed"));
  comm_group_ = mpi.look_up("MPI_Comm_group");
  group_size_ = mpi.look_up("MPI_Group_size");
  translate_ranks_ = mpi.look_up("MPI_Group_translate_ranks");
  group_free_ = mpi.look_up("MPI_Group_free");
}

bool Mpi::has_died(int rank) const {
  MpiHandle dead = 0;
  if (get_failed_ == nullptr || get_failed_(communicator, &dead) != kMpiSuccess) return false;
  int count = 0, place = -1;  // a rank outside of the group has a negative place
  MpiHandle all = 0;
  if (group_size_(dead, &count) == kMpiSuccess && count > 0 && comm_group_(communicator, &all) == kMpiSuccess) {
    translate_ranks_(all, 1, &rank, dead, &place);
    group_free_(&all);
  }
  group_free_(&dead);
  return place >= 0;
}

void MpiExit::resolve(const std::string& library) {
  void* const loaded = find_loaded(library);
  const Library mpi(loaded, kName);
  finalized = mpi.look_up("MPI_Finalized");
  finalize = mpi.look_up("MPI_Finalize");
  agree = reinterpret_cast<decltype(agree)>(dlsym(loaded, "MPIX_Comm_agree"));
}

}  // namespace horovodish::abi
