#include "planes/adasum.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "arithmetic/reduce.h"
#include "arithmetic/standard_floats.h"

namespace horovodish {

namespace {

size_t pairs_of(size_t ranks) { return ranks * (ranks + 1) / 2; }

// Of a sum of products in float64, relative to its terms; with a margin.
constexpr double kRounding = 1e-13;

// A combination of the gradients of ranks [begin, begin + weights.size()).
struct Combination {
  size_t begin;
  std::vector<double> weights;
};

// A gradient of zeros has nothing in common with any other.
double kept(double product, double square) { return square > 0 ? 1 - product / (2 * square) : 1; }

}  // namespace

std::vector<double> adasum_coefficients(const double* of_pairs, size_t ranks) {
  const StandardFloats mode;
  // 0 where the terms cancel so far that rounding is all that is left.
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

Adasum::Adasum(const Concatenation& concatenation, size_t ranks, double scale)
    : concatenation_(concatenation),
      ranks_(ranks),
      pairs_(pairs_of(ranks)),
      scale_(scale),
      products_(concatenation.tensors().size() * pairs_) {}

void Adasum::add_products(Range range, const std::vector<const std::byte*>& sources) {
  const StandardFloats mode;
  const DType dtype = concatenation_.dtype();
  const size_t item = concatenation_.item_bytes();
  concatenation_.for_each_piece(
      range, [&](const Concatenation::Tensor& tensor, size_t, size_t length, size_t position) {
        double* product = products_.data() + concatenation_.index_of(tensor) * pairs_;
        for (size_t i = 0; i < ranks_; ++i) {
          for (size_t j = i; j < ranks_; ++j) {
            *product++ += dot(dtype, sources[i] + position * item, sources[j] + position * item, length);
          }
        }
      });
}

Concatenation Adasum::tables() {
  Concatenation result(DType::float64);
  auto* const bytes = reinterpret_cast<std::byte*>(products_.data());
  result.append(bytes, bytes, products_.size());
  return result;
}

void Adasum::weigh() {
  const StandardFloats mode;
  for (size_t tensor = 0; tensor < concatenation_.tensors().size(); ++tensor) {
    auto& weights = coefficients_.emplace_back(adasum_coefficients(products_.data() + tensor * pairs_, ranks_));
    for (double& weight : weights) weight *= scale_;
  }
}

void Adasum::combine(Range range, const std::vector<const std::byte*>& sources, std::byte* target) const {
  const size_t item = concatenation_.item_bytes();
  std::vector<const void*> pieces(ranks_);
  concatenation_.for_each_piece(range,
                                [&](const Concatenation::Tensor& tensor, size_t, size_t length, size_t position) {
                                  for (size_t rank = 0; rank < ranks_; ++rank)
                                    pieces[rank] = sources[rank] + position * item;
                                  weighted_sum(concatenation_.dtype(), target + position * item, pieces.data(),
                                               coefficients_[concatenation_.index_of(tensor)].data(), ranks_, length);
                                });
}

}  // namespace horovodish
