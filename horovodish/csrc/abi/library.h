// Looking up foreign functions at run time.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace horovodish::abi {

// Opens a library for good, or finds it loaded; throws std::runtime_error with the loader's reason.
inline void* open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(std::string("it does not load: ") + dlerror());
  return library;
}

template <class Function>
void look_up(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw std::runtime_error(path + " has no function " + name);
}

}  // namespace horovodish::abi
