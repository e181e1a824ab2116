// Encoding of control messages: little-endian base-128 integers, raw doubles and length-prefixed strings.
// Both ends are the same build on the same architecture, so there is no version field.
//
// A struct that travels lists its fields once, and write() and read() follow the list:
//     struct Lost {
//       Loss loss;
//       std::string text;
//       static auto fields(auto& its) { return std::tie(its.loss, its.text); }
//     };
// If it has a function check(), read() calls that, and it throws std::runtime_error unless the fields fit together.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "negotiation/world_rank.h"

namespace horovodish {

// How many enumerators there are, from 0.
template <class Enum>
inline constexpr uint64_t kEnumerators = 0;

template <class T>
concept Listed = requires(T& its) { T::fields(its); };

class Writer {
 public:
  template <class T>
  void write(const T& value) {
    if constexpr (Listed<T>) {
      std::apply([this](const auto&... its) { (write(its), ...); }, T::fields(value));
    } else if constexpr (std::is_same_v<T, double>) {
      real(value);
    } else if constexpr (std::is_same_v<T, int64_t>) {
      signed_number(value);
    } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
      number(static_cast<uint64_t>(value));
    } else {
      text(value);
    }
  }
  template <class T>
  void write(const std::vector<T>& values) {
    number(values.size());
    for (const T& value : values) write(value);
  }
  template <class First, class Second>
  void write(const std::pair<First, Second>& pair) {
    write(pair.first);
    write(pair.second);
  }

  void number(uint64_t value) {
    while (value >= 0x80) {
      bytes_.push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    bytes_.push_back(static_cast<char>(value));
  }
  // Zigzag, so that -1 takes one byte.
  void signed_number(int64_t value) {
    number((static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63));
  }
  void real(double value) {
    char raw[sizeof value];
    std::memcpy(raw, &value, sizeof value);
    bytes_.append(raw, sizeof value);
  }
  void text(std::string_view value) {
    number(value.size());
    bytes_.append(value);
  }
  bool empty() const { return bytes_.empty(); }
  std::string take() { return std::exchange(bytes_, {}); }

 private:
  std::string bytes_;
};

// A Reader gives a value or throws std::runtime_error, whatever the bytes are.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <class T>
  T read() {
    T value{};
    read(value);
    return value;
  }
  template <class T>
  void read(T& value) {
    if constexpr (Listed<T>) {
      std::apply([this](auto&... its) { (read(its), ...); }, T::fields(value));
      if constexpr (requires { value.check(); }) value.check();
    } else if constexpr (std::is_same_v<T, double>) {
      value = real();
    } else if constexpr (std::is_same_v<T, int64_t>) {
      value = signed_number();
    } else if constexpr (std::is_same_v<T, WorldRank>) {
      value = WorldRank(read<int>());
    } else if constexpr (std::is_enum_v<T>) {
      value = static_cast<T>(number_below(kEnumerators<T>));
    } else if constexpr (std::is_same_v<T, uint64_t>) {
      value = number();
    } else if constexpr (std::is_same_v<T, bool>) {
      value = number_below(2) != 0;
    } else if constexpr (std::is_integral_v<T>) {
      // INT_MAX is not a valid rank, so the number of ranks in a range from 0 fits into an int, too.
      value = static_cast<T>(number_below(static_cast<uint64_t>(std::numeric_limits<T>::max())));
    } else {
      value = text();
    }
  }
  template <class T>
  void read(std::vector<T>& values) {
    values.resize(count());
    for (T& value : values) read(value);
  }
  template <class First, class Second>
  void read(std::pair<First, Second>& pair) {
    read(pair.first);
    read(pair.second);
  }

  uint64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(raw(1)[0]);
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    throw std::runtime_error("control message: integer too long");
  }
  // A number that is less than `end`: an enumerator, a rank.
  uint64_t number_below(uint64_t end) {
    const uint64_t value = number();
    if (value >= end) throw std::runtime_error("control message: there is no " + std::to_string(value));
    return value;
  }
  // A number of items that follow. Each takes at least a byte, so a wrong number costs no more memory than the message.
  size_t count() { return number_below(bytes_.size() + 1); }
  int64_t signed_number() {
    const uint64_t value = number();
    return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
  }
  double real() {
    double value;
    std::memcpy(&value, raw(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view text() { return raw(number()); }
  bool done() const { return bytes_.empty(); }

 private:
  std::string_view raw(size_t length) {
    if (length > bytes_.size()) throw std::runtime_error("control message: cut short");
    const std::string_view head = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
    return head;
  }
  std::string_view bytes_;
};

}  // namespace horovodish
