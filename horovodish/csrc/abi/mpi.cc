#include "abi/mpi.h"

#include <dlfcn.h>

#include <stdexcept>

namespace horovodish::abi {

namespace {
template <class Function>
void look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(std::string("the loaded MPI library has no function ") + name);
}

void* open_loaded(const std::string& library) {
  void* loaded = dlopen(library.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (loaded == nullptr) throw std::runtime_error("mpi4py's extension module is not loaded: " + library);
  return loaded;
}
}  // namespace

void Mpi::resolve() {
  void* loaded = open_loaded(library);
  look_up(loaded, "MPI_Isend", isend);
  look_up(loaded, "MPI_Issend", issend);
  look_up(loaded, "MPI_Irecv", irecv);
  look_up(loaded, "MPI_Test", test);
  look_up(loaded, "MPI_Cancel", cancel);
  look_up(loaded, "MPI_Get_count", get_count);
  look_up(loaded, "MPI_Error_string", error_string);
  if (tolerates_faults) get_failed_ = reinterpret_cast<decltype(get_failed_)>(dlsym(loaded, "MPIX_Comm_get_failed"));
  look_up(loaded, "MPI_Comm_group", comm_group_);
  look_up(loaded, "MPI_Group_size", group_size_);
  look_up(loaded, "MPI_Group_translate_ranks", translate_ranks_);
  look_up(loaded, "MPI_Group_free", group_free_);
}

bool Mpi::has_died(int rank) const {
  MpiHandle dead = 0;
  if (get_failed_ == nullptr || get_failed_(communicator, &dead) != kMpiSuccess) return false;
  int count = 0, place = -1;  // a rank that is not in the group has a negative place
  MpiHandle all = 0;
  if (group_size_(dead, &count) == kMpiSuccess && count > 0 && comm_group_(communicator, &all) == kMpiSuccess) {
    translate_ranks_(all, 1, &rank, dead, &place);
    group_free_(&all);
  }
  group_free_(&dead);
  return place >= 0;
}

void MpiExit::resolve(const std::string& library) {
  void* loaded = open_loaded(library);
  look_up(loaded, "MPI_Finalized", finalized);
  look_up(loaded, "MPI_Finalize", finalize);
  agree = reinterpret_cast<decltype(agree)>(dlsym(loaded, "MPIX_Comm_agree"));
}

}  // namespace horovodish::abi
