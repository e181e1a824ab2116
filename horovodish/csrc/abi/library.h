// Looking up foreign functions at run time.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace horovodish::abi {

// The address of a function. It converts to the type of the pointer that it is assigned to.
struct Function {
  void* address;

  template <class Pointer>
  operator Pointer() const {
    return reinterpret_cast<Pointer>(address);
  }
};

class Library {
 public:
  // Opens a library for good, or finds it loaded. Throws std::runtime_error with the loader's reason.
  explicit Library(const std::string& path) : Library(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), path) {
    if (opened_ == nullptr) throw std::runtime_error(std::string("it does not load: ") + dlerror());
  }
  // A library that is loaded already. `name`: for messages.
  Library(void* opened, std::string name) : opened_(opened), name_(std::move(name)) {}

  // Throws std::runtime_error if the library has no such function.
  Function look_up(const char* function) const {
    void* const found = dlsym(opened_, function);
    if (found == nullptr) throw std::runtime_error(name_ + " has no function " + function);
    return {found};
  }

 private:
  void* opened_;
  std::string name_;
};

}  // namespace horovodish::abi
