// The shapes of an operation's results, as far as they are known before it runs.
#pragma once

#include "abi/tensorflow.h"

namespace horovodish::tensorflow::shapes {

// The inputs of every operation: its name as input 0, its tensors, and then `more` inputs.

template <int more>
void like_tensors(TF_ShapeInferenceContext* context, TF_Status* status);
// The tensors' shapes with any number of rows, and for each tensor a vector with the number of rows for every rank.
template <int more>
void gathered(TF_ShapeInferenceContext* context, TF_Status* status);
// The tensors' shapes with any number of rows.
template <int more>
void scattered(TF_ShapeInferenceContext* context, TF_Status* status);
void scalar(TF_ShapeInferenceContext* context, TF_Status* status);
void nothing(TF_ShapeInferenceContext* context, TF_Status* status);

}  // namespace horovodish::tensorflow::shapes
