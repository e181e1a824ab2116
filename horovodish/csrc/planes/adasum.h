// Adasum: a sum in which what the ranks' gradients have in common counts once.
//
//     adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b
//
// of neighbouring ranks, then of neighbouring pairs, and so on up a binary tree; a rank without a partner goes up as it is.
// Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, arXiv:2006.02924.
//
// Every value in that tree is a combination of the ranks' gradients, so its products follow from those of the gradients.
// Hence two passes over a tensor, in which each rank needs no more than a shard of every gradient: first the products of
// all pairs of gradients, then one weighted sum. As many bytes move as in the two halves of a ring.
#pragma once

#include <cstddef>
#include <vector>

namespace horovodish {

// The coefficients of the ranks' gradients in their Adasum, from the products of all pairs i <= j, in that order.
std::vector<double> adasum_coefficients(const double* products, size_t ranks);

}  // namespace horovodish
