#include "abi/cuda.h"

#include <stdexcept>

namespace horovodish::abi {

void Cuda::check(int result, const char* what) const {
  if (result == kCudaSuccess) return;
  const char *name = nullptr, *text = nullptr;
  get_error_name(result, &name);
  get_error_string(result, &text);
  const char* const remedy =
      result == kCudaOutOfMemory
          ? ". Remedy: leave the engine some of the GPU's memory: by a smaller batch, by the framework's own limit "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION, torch.cuda.set_per_process_memory_fraction), or by a smaller "
            "HOROVODISH_FUSION_THRESHOLD_MB."
          : "";
  throw std::runtime_error(std::string("CUDA failed while ") + what + ": " +
                           (name == nullptr ? "error " + std::to_string(result) : name) +
                           (text == nullptr ? "" : std::string(", ") + text) + remedy);
}

}  // namespace horovodish::abi
