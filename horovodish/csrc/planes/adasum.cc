#include "planes/adasum.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "arithmetic/standard_floats.h"

namespace horovodish {

namespace {

// Rounding error of a sum of products in float64, relative to its terms, with a margin.
constexpr double kRounding = 1e-13;

// A combination of the gradients of ranks [begin, begin + weights.size()).
struct Combination {
  size_t begin;
  std::vector<double> weights;
};

// A gradient of zeros has nothing in common with others.
double kept(double product, double square) { return square > 0 ? 1 - product / (2 * square) : 1; }

}  // namespace

std::vector<double> adasum_coefficients(const double* of_pairs, size_t ranks) {
  const StandardFloats mode;
  // 0 if the terms cancel so far that only rounding is left.
  const auto product = [&](const Combination& a, const Combination& b) {
    double sum = 0, magnitude = 0;
    for (size_t i = 0; i < a.weights.size(); ++i) {
      for (size_t j = 0; j < b.weights.size(); ++j) {
        const auto [low, high] = std::minmax({a.begin + i, b.begin + j});
        const double term = a.weights[i] * b.weights[j] * of_pairs[low * ranks - low * (low + 1) / 2 + high];
        sum += term;
        magnitude += std::abs(term);
      }
    }
    return std::abs(sum) < kRounding * magnitude ? 0 : sum;
  };
  std::vector<Combination> level;
  for (size_t rank = 0; rank < ranks; ++rank) level.push_back({rank, {1.0}});
  while (level.size() > 1) {
    std::vector<Combination> next;
    for (size_t i = 0; i < level.size(); i += 2) {
      Combination& a = next.emplace_back(std::move(level[i]));
      if (i + 1 == level.size()) break;
      const Combination& b = level[i + 1];
      const double common = product(a, b);
      const double of_a = kept(common, product(a, a)), of_b = kept(common, product(b, b));
      for (double& weight : a.weights) weight *= of_a;
      for (const double weight : b.weights) a.weights.push_back(weight * of_b);
    }
    level = std::move(next);
  }
  return level.front().weights;
}

}  // namespace horovodish
