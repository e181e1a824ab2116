// Keeping the callback of an asynchronous kernel until its operation is done.
//
// TensorFlow passes a pointer to a std::function<void()> on its own stack, which is gone once the kernel has returned. A
// copy outlives it. The copy takes for granted that both sides lay a std::function out alike, as libstdc++ does: two words
// for what it holds, the function that manages it and the function that calls it. looks_like_ours() checks that.
#pragma once

#include <functional>

#include "abi/tensorflow.h"

namespace horovodish::tensorflow {

using Callback = std::function<void()>;

bool looks_like_ours(const void* callback);

inline Callback kept(TF_AsyncOpKernelDoneCallback* callback) { return *reinterpret_cast<const Callback*>(callback); }

}  // namespace horovodish::tensorflow
