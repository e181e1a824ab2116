// Times each codec on one core, for codec_speed.py: a line with its name, the bytes of a value, and GB/s of float32 values
// encoded, and decoded and added, in the fastest round.
//
//     codec_speed MILLIONS_OF_VALUES ROUNDS
//
// As in the engine, a tile is copied out of a large array before it is encoded, and added to a tile that is in the cache.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "arithmetic/codecs/codec.h"

using namespace horovodish;

namespace {

constexpr double kShare = 0.01;

template <class Work>
double gb_per_second(size_t values, size_t rounds, Work work) {
  double least = std::numeric_limits<double>::max();
  for (size_t round = 0; round < rounds; ++round) {
    const auto started = std::chrono::steady_clock::now();
    for (size_t begin = 0; begin < values; begin += Codec::kTile) work(begin);
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }
  return static_cast<double>(values * sizeof(float)) / least / 1e9;
}

}  // namespace

int main(int, char** arguments) {
  const size_t values = std::strtoul(arguments[1], nullptr, 10) * 1'000'000 / Codec::kTile * Codec::kTile;
  const size_t rounds = std::strtoul(arguments[2], nullptr, 10);
  std::vector<float> all(values), tile(Codec::kTile), sum(Codec::kTile);
  std::mt19937 random;
  std::normal_distribution<float> normal;
  for (float& value : all) value = normal(random);
  for (size_t kind = 1; kind < static_cast<size_t>(CodecKind::automatic); ++kind) {
    const Codec codec(static_cast<CodecKind>(kind), kShare);
    std::vector<std::byte> codes(codec.bytes(values));
    const double encoded = gb_per_second(values, rounds, [&](size_t begin) {
      std::copy_n(all.begin() + static_cast<ptrdiff_t>(begin), Codec::kTile, tile.begin());
      codec.encode(tile.data(), Codec::kTile, codes.data() + codec.bytes(begin), begin);
    });
    const double decoded = gb_per_second(values, rounds, [&](size_t begin) {
      codec.decode(codes.data() + codec.bytes(begin), sum.data(), Codec::kTile, begin, true);
    });
    std::printf("%-8s %7.4f %8.2f %8.2f\n", kCodecNames[kind].data(),
                static_cast<double>(codec.bytes(values)) / static_cast<double>(values), encoded, decoded);
  }
}
