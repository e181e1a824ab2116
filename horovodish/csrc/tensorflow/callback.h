// Keeping the callback of an asynchronous kernel until its operation is done.
//
// TensorFlow passes a pointer to a std::function<void()> on its own stack, which is gone once the kernel has returned. A
// copy outlives it. TensorFlow is compiled for libstdc++. Our library may be compiled for another C++ library, so the copy
// is made by libstdc++'s layout, which is spelled out here: bits/std_function.h of GCC 5 to 15. looks_like_ours() checks it.
#pragma once

#include <array>
#include <cstdint>

#include "abi/tensorflow.h"

namespace horovodish::tensorflow {

struct FunctionLayout {
  using Storage = std::array<uintptr_t, 2>;
  enum Operation : int { copy = 2, destroy = 3 };

  Storage storage{};
  bool (*manage)(Storage& target, const Storage& source, Operation) = nullptr;
  void (*call)(const Storage&) = nullptr;
};

class Callback {
 public:
  explicit Callback(TF_AsyncOpKernelDoneCallback* callback) {
    const auto& original = *reinterpret_cast<const FunctionLayout*>(callback);
    original.manage(function_.storage, original.storage, FunctionLayout::copy);
    function_.manage = original.manage;
    function_.call = original.call;
  }
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;
  ~Callback() { function_.manage(function_.storage, function_.storage, FunctionLayout::destroy); }

  void operator()() const { function_.call(function_.storage); }

 private:
  FunctionLayout function_;
};

bool looks_like_ours(const void* callback);

}  // namespace horovodish::tensorflow
