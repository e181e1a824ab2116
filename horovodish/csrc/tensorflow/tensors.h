// Owners of TensorFlow's objects.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "abi/tensorflow.h"
#include "arithmetic/types.h"

namespace horovodish::tensorflow {

// For a unique_ptr that returns an object to TensorFlow by `release`.
template <auto release>
struct GiveBack {
  void operator()(auto* owned) const { release(owned); }
};
using TensorPtr = std::unique_ptr<TF_Tensor, GiveBack<&TF_DeleteTensor>>;

class Status {
 public:
  Status() : status_(TF_NewStatus()) {}
  Status(TF_Code code, const char* message) : Status() { TF_SetStatus(get(), code, message); }
  TF_Status* get() const { return status_.get(); }
  bool ok() const { return TF_GetCode(status_.get()) == TF_OK; }

 private:
  std::unique_ptr<TF_Status, GiveBack<&TF_DeleteStatus>> status_;
};

inline TensorPtr input(TF_OpKernelContext* context, int index, Status& status) {
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, index, &tensor, status.get());
  return TensorPtr(tensor);
}

// Copies values to a new output of the running operation.
inline void set_output(TF_OpKernelContext* context, size_t index, TF_DataType type, const std::vector<int64_t>& dims,
                       const void* values, size_t bytes, Status& status) {
  if (!status.ok()) return;
  const TensorPtr output(TF_AllocateOutput(context, static_cast<int>(index), type, dims.data(),
                                           static_cast<int>(dims.size()), bytes, status.get()));
  if (status.ok() && bytes > 0) std::memcpy(TF_TensorData(output.get()), values, bytes);
}

inline std::vector<int64_t> dims_of(const TF_Tensor* tensor) {
  std::vector<int64_t> dims(static_cast<size_t>(TF_NumDims(tensor)));
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = TF_Dim(tensor, static_cast<int>(i));
  return dims;
}

// Of the types that the definitions of the operations accept.
inline DType dtype_of(TF_DataType type) {
  constexpr std::array<TF_DataType, kDTypeNames.size()> kDTypes{  // in the order of DType
                                                                TF_BOOL,   TF_UINT8,  TF_INT8,     TF_INT16, TF_INT32,
                                                                TF_INT64,  TF_HALF,   TF_BFLOAT16, TF_FLOAT, TF_DOUBLE,
                                                                TF_UINT16, TF_UINT32, TF_UINT64};
  return static_cast<DType>(std::find(kDTypes.begin(), kDTypes.end(), type) - kDTypes.begin());
}

}  // namespace horovodish::tensorflow
