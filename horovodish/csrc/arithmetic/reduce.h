// The arithmetic: every dtype x reduction operator, with averaging and scaling fused in.
#pragma once

#include <cstddef>
#include <utility>

#include "arithmetic/types.h"

namespace horovodish {

struct Scaling {
  double prescale = 1.0;   // multiplies every contribution before the reduction
  double postscale = 1.0;  // multiplies the result
  int divisor = 1;         // of an average: how many ranks contributed
};

// target[i] = postscale / divisor * (prescale * sources[0][i] op prescale * sources[1][i] op ...), reduced from left to
// right, so that the bits of an element depend neither on its place nor on how the work is split. `target` may be one
// of the sources.
//   float16, bfloat16: accumulated in float32, rounded once.
//   integers: sums and products wrap around; an average then rounds towards zero. A scale is applied in float64 and rounds
//   towards zero, too, once for an average and its scale together. A factor that is NaN gives 0. Min and Max return NaN where any contribution is NaN.
//   Denormals are kept, whatever the calling thread does with them.
void reduce(DType dtype, ReduceOp op, void* target, const void* const* sources, size_t sources_count, size_t count,
            const Scaling& scaling);

// A reduction in stages. Returns the scaling of the contributions and the scaling of the last stage; stages in between
// have none. Partial results are stored in `dtype`. A sum of float16 numbers can be too large for float16 although its
// average is not. So a part of the factor that makes the result smaller is applied to the contributions: a power of
// two, which changes no digit.
//     average of 60000 on 4 ranks    60000 + 60000 = infinity    60000 / 4 + 60000 / 4 = 30000
// `contributions`: the most contributions that are added.
std::pair<Scaling, Scaling> in_stages(DType dtype, ReduceOp op, const Scaling& scaling, size_t contributions);

// Floating-point numbers of `dtype`, times `factor`, as float32; and the other way.
void load_floats(DType dtype, const void* source, float* target, size_t count, double factor);
void store_floats(DType dtype, const float* source, void* target, size_t count, double factor);

// The value that changes no result of `op`, `count` times.
void fill_identity(DType dtype, ReduceOp op, void* target, size_t count);

// left[0] * right[0] + left[1] * right[1] + ... of a floating-point dtype, in float64. The order of the additions is fixed.
double dot(DType dtype, const void* left, const void* right, size_t count);

// target[i] = weights[0] * sources[0][i] + weights[1] * sources[1][i] + ... of a floating-point dtype. `target` may be one
// of the sources.
void weighted_sum(DType dtype, void* target, const void* const* sources, const double* weights, size_t sources_count,
                  size_t count);

}  // namespace horovodish
