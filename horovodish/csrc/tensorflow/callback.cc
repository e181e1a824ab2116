#include "tensorflow/callback.h"

#include <link.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace horovodish::tensorflow {

namespace {

// The loaded object that has code at an address; 0: none.
uintptr_t object_with_code_at(uintptr_t address) {
  struct Search {
    uintptr_t address;
    uintptr_t found = 0;
  } search{address};
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* argument) {
        auto& search = *static_cast<Search*>(argument);
        for (size_t i = 0; i < object->dlpi_phnum; ++i) {
          const auto& segment = object->dlpi_phdr[i];
          const uintptr_t begin = object->dlpi_addr + segment.p_vaddr;
          const bool inside = search.address >= begin && search.address < begin + segment.p_memsz;
          if (segment.p_type == PT_LOAD && (segment.p_flags & PF_X) != 0 && inside) search.found = object->dlpi_addr;
        }
        return search.found != 0 ? 1 : 0;
      },
      &search);
  return search.found;
}

}  // namespace

bool looks_like_ours(const void* callback) {
  std::array<uintptr_t, 4> words{};
  static_assert(sizeof(FunctionLayout) == sizeof(words));
  std::memcpy(words.data(), callback, sizeof(words));
  const uintptr_t object = object_with_code_at(words[2]);
  return object != 0 && object == object_with_code_at(words[3]);
}

}  // namespace horovodish::tensorflow
