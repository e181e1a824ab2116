// Adasum: a sum that counts the common part of the ranks' gradients once.
//
//     adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b
//
// It adds neighbouring ranks, then neighbouring pairs, and so on up a binary tree. A rank without a partner goes up
// unchanged.
// Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, arXiv:2006.02924.
//
// Every value in the tree is a combination of the ranks' gradients, so its products follow from the products of the
// gradients. Hence two passes over a tensor are enough, and each rank needs only a shard of every gradient. The first
// pass computes the products of all pairs of gradients, the second one a weighted sum. They move as many bytes as the
// two halves of a ring.
#pragma once

#include <cstddef>
#include <vector>

namespace horovodish {

// The coefficients of the ranks' gradients in their Adasum, from the products of all pairs i <= j, in that order.
std::vector<double> adasum_coefficients(const double* products, size_t ranks);

}  // namespace horovodish
