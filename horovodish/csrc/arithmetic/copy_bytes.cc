#include "arithmetic/copy_bytes.h"

#include <cstdint>
#include <cstring>

#include "arithmetic/instructions.h"

namespace horovodish {

namespace {

// Below this many bytes the C library uses vector registers, too.
constexpr size_t kLong = 2048;

constexpr size_t kVector = 32;
using Vector = char __attribute__((vector_size(kVector), may_alias));

// `bytes` is at least kLong.
HOROVODISH_VARIANTS(void, copy_vectors, (char* target, const char* source, size_t bytes), (target, source, bytes), {
  const size_t head = kVector - reinterpret_cast<uintptr_t>(target) % kVector;
  std::memcpy(target, source, kVector);
  size_t at = head;
  for (; at + 4 * kVector <= bytes; at += 4 * kVector) {
    const auto to = reinterpret_cast<Vector*>(target + at);
    // The source is not aligned. Clang and GCC differ in how a type says that, so memcpy says it.
    Vector first;
    Vector second;
    Vector third;
    Vector fourth;
    std::memcpy(&first, source + at, kVector);
    std::memcpy(&second, source + at + kVector, kVector);
    std::memcpy(&third, source + at + 2 * kVector, kVector);
    std::memcpy(&fourth, source + at + 3 * kVector, kVector);
    to[0] = first;
    to[1] = second;
    to[2] = third;
    to[3] = fourth;
  }
  std::memcpy(target + at, source + at, bytes - at);
})

}  // namespace

void copy_bytes(void* target, const void* source, size_t bytes) {
  if (bytes < kLong) {
    std::memcpy(target, source, bytes);
  } else {
    copy_vectors(static_cast<char*>(target), static_cast<const char*>(source), bytes);
  }
}

}  // namespace horovodish
