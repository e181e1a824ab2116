// The shapes of an operation's results, as far as they are known before it runs.
#pragma once

#include <cstdint>
#include <memory>

#include "tensorflow/tensors.h"

namespace horovodish::tensorflow::shapes {

using Shape = std::unique_ptr<TF_ShapeHandle, GiveBack<&TF_DeleteShapeHandle>>;

inline Shape unset() { return Shape(TF_NewShapeHandle()); }

inline Shape input_shape(TF_ShapeInferenceContext* context, int index, TF_Status* status) {
  Shape shape = unset();
  TF_ShapeInferenceContextGetInput(context, index, shape.get(), status);
  return shape;
}

// A vector of unknown length: a wholly unknown shape, restricted to one dimension.
inline Shape any_vector(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shape unknown = unset(), vector = unset();
  TF_ShapeInferenceContextWithRank(context, unknown.get(), 1, vector.get(), status);
  return vector;
}

// `shape` with any number of rows; unknown if its rank is unknown.
inline Shape any_rows_of(TF_ShapeInferenceContext* context, TF_ShapeHandle* shape, TF_Status* status) {
  Shape checked = unset(), row = unset(), result = unset();
  TF_ShapeInferenceContextWithRankAtLeast(context, shape, 1, checked.get(), status);
  if (TF_GetCode(status) != TF_OK || TF_ShapeInferenceContextRankKnown(context, shape) == 0) return checked;
  TF_ShapeInferenceContextSubshape(context, checked.get(), 1, INT64_MAX, row.get(), status);
  if (TF_GetCode(status) != TF_OK) return checked;
  const Shape rows = any_vector(context, status);
  if (TF_GetCode(status) != TF_OK) return checked;
  TF_ShapeInferenceContextConcatenateShapes(context, rows.get(), row.get(), result.get(), status);
  return result;
}

inline void set_rows(TF_ShapeInferenceContext* context, int tensors, bool with_counts, TF_Status* status) {
  for (int i = 0; i < tensors && TF_GetCode(status) == TF_OK; ++i) {
    const Shape shape = input_shape(context, i + 1, status);
    if (TF_GetCode(status) != TF_OK) return;
    const Shape rows = any_rows_of(context, shape.get(), status);
    if (TF_GetCode(status) != TF_OK) return;
    TF_ShapeInferenceContextSetOutput(context, i, rows.get(), status);
    if (!with_counts || TF_GetCode(status) != TF_OK) continue;
    const Shape counts = any_vector(context, status);
    if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, tensors + i, counts.get(), status);
  }
}

// The inputs of every operation: its name as input 0, its tensors, and then `more` inputs.
template <int more>
int tensors_of(TF_ShapeInferenceContext* context) {
  return static_cast<int>(TF_ShapeInferenceContextNumInputs(context)) - 1 - more;
}

template <int more>
void like_tensors(TF_ShapeInferenceContext* context, TF_Status* status) {
  for (int i = 0; i < tensors_of<more>(context) && TF_GetCode(status) == TF_OK; ++i) {
    const Shape shape = input_shape(context, i + 1, status);
    if (TF_GetCode(status) == TF_OK) TF_ShapeInferenceContextSetOutput(context, i, shape.get(), status);
  }
}

// The tensors' shapes with any number of rows, and for each tensor a vector with the number of rows for every rank.
template <int more>
void gathered(TF_ShapeInferenceContext* context, TF_Status* status) {
  set_rows(context, tensors_of<more>(context), true, status);
}

// The tensors' shapes with any number of rows.
template <int more>
void scattered(TF_ShapeInferenceContext* context, TF_Status* status) {
  set_rows(context, tensors_of<more>(context), false, status);
}

template <int outputs>
void scalars(TF_ShapeInferenceContext* context, TF_Status* status) {
  const Shape shape(TF_ShapeInferenceContextScalar(context));
  for (int i = 0; i < outputs && TF_GetCode(status) == TF_OK; ++i) {
    TF_ShapeInferenceContextSetOutput(context, i, shape.get(), status);
  }
}

}  // namespace horovodish::tensorflow::shapes
