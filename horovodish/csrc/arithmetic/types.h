// The basic types of the engine: data types, reduction operators and kinds of operation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace horovodish {

enum class DType : uint8_t {
  boolean,
  uint8,
  int8,
  int16,
  int32,
  int64,
  float16,
  bfloat16,
  float32,
  float64,
  uint16,
  uint32,
  uint64
};
inline constexpr std::array<std::string_view, 13> kDTypeNames{"bool",   "uint8",   "int8",     "int16",   "int32",
                                                              "int64",  "float16", "bfloat16", "float32", "float64",
                                                              "uint16", "uint32",  "uint64"};
inline constexpr std::array<size_t, 13> kDTypeBytes{1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 2, 4, 8};

enum class ReduceOp : uint8_t { average, sum, adasum, min, max, product };
inline constexpr std::array<std::string_view, 6> kReduceOpNames{"average", "sum", "adasum", "min", "max", "product"};

enum class Kind : uint8_t { allreduce, allgather, broadcast, alltoall, reducescatter, barrier, join, send, receive };
inline constexpr std::array<std::string_view, 9> kKindNames{
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "send", "receive"};

inline std::string_view name_of(DType dtype) { return kDTypeNames[static_cast<size_t>(dtype)]; }
inline std::string_view name_of(ReduceOp op) { return kReduceOpNames[static_cast<size_t>(op)]; }
inline std::string_view name_of(Kind kind) { return kKindNames[static_cast<size_t>(kind)]; }
// Bool, and unsigned integers of more than 8 bits. They are only moved; no reduction takes them.
inline bool only_moves(DType dtype) { return dtype == DType::boolean || dtype >= DType::uint16; }
inline bool is_floating(DType dtype) { return dtype >= DType::float16 && dtype <= DType::float64; }
inline size_t bytes_of(DType dtype) { return kDTypeBytes[static_cast<size_t>(dtype)]; }

}  // namespace horovodish
