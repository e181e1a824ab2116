// What is known of an operation's results before it runs.
#pragma once

#include "abi/tensorflow.h"

namespace horovodish::tensorflow::shapes {

// Every operation has its name as input 0, its tensors after it, and then `more` inputs.

template <int more>
void like_tensors(TF_ShapeInferenceContext* context, TF_Status* status);
// Any number of rows, otherwise like the tensors; then, for each, a vector with a number of rows for every rank.
template <int more>
void gathered(TF_ShapeInferenceContext* context, TF_Status* status);
// Any number of rows, otherwise like the tensors.
template <int more>
void scattered(TF_ShapeInferenceContext* context, TF_Status* status);
void scalar(TF_ShapeInferenceContext* context, TF_Status* status);
void nothing(TF_ShapeInferenceContext* context, TF_Status* status);

}  // namespace horovodish::tensorflow::shapes
