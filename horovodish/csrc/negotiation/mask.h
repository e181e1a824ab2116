// A set of members of a bucket: one bit for each. The empty mask stands for all zeros.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace horovodish {

using Mask = std::string;

inline Mask make_mask(const std::vector<size_t>& bits, size_t size) {
  if (bits.empty()) return {};
  Mask mask((size + 7) / 8, '\0');
  for (const size_t bit : bits) mask[bit / 8] = static_cast<char>(mask[bit / 8] | (1 << (bit % 8)));
  return mask;
}

inline bool mask_bit(const Mask& mask, size_t bit) {
  return bit / 8 < mask.size() && ((mask[bit / 8] >> (bit % 8)) & 1) != 0;
}

// A bit that one of the masks has no room for is zero.
inline Mask intersection(const Mask& a, const Mask& b) {
  if (a.empty() || b.empty()) return {};
  Mask both = a.substr(0, b.size());
  bool any = false;
  for (size_t i = 0; i < both.size(); ++i) {
    both[i] = static_cast<char>(both[i] & b[i]);
    any |= both[i] != 0;
  }
  return any ? both : Mask{};
}

}  // namespace horovodish
