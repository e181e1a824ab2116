// Owners of what TensorFlow hands out.
#pragma once

#include <memory>
#include <vector>

#include "abi/tensorflow.h"
#include "arithmetic/types.h"

namespace horovodish::tensorflow {

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using TensorPtr = std::unique_ptr<TF_Tensor, DeleteTensor>;

class Status {
 public:
  Status() : status_(TF_NewStatus()) {}
  Status(TF_Code code, const char* message) : Status() { TF_SetStatus(get(), code, message); }
  TF_Status* get() const { return status_.get(); }
  bool ok() const { return TF_GetCode(status_.get()) == TF_OK; }

 private:
  struct Delete {
    void operator()(TF_Status* status) const { TF_DeleteStatus(status); }
  };
  std::unique_ptr<TF_Status, Delete> status_;
};

inline TensorPtr input(TF_OpKernelContext* context, int index, Status& status) {
  TF_Tensor* tensor = nullptr;
  TF_GetInput(context, index, &tensor, status.get());
  return TensorPtr(tensor);
}

inline std::vector<int64_t> dims_of(const TF_Tensor* tensor) {
  std::vector<int64_t> dims(static_cast<size_t>(TF_NumDims(tensor)));
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = TF_Dim(tensor, static_cast<int>(i));
  return dims;
}

// Of the types that the definitions of the operations admit.
inline DType dtype_of(TF_DataType type) {
  switch (type) {
    case TF_BOOL:
      return DType::boolean;
    case TF_UINT8:
      return DType::uint8;
    case TF_INT8:
      return DType::int8;
    case TF_INT16:
      return DType::int16;
    case TF_INT32:
      return DType::int32;
    case TF_INT64:
      return DType::int64;
    case TF_HALF:
      return DType::float16;
    case TF_BFLOAT16:
      return DType::bfloat16;
    case TF_UINT16:
      return DType::uint16;
    case TF_UINT32:
      return DType::uint32;
    case TF_UINT64:
      return DType::uint64;
    case TF_DOUBLE:
      return DType::float64;
    case TF_FLOAT:
      break;
  }
  return DType::float32;
}

}  // namespace horovodish::tensorflow
