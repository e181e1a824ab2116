// The least that an all-reduce of two ranks costs if each rank's tensor lies in memory that both ranks map.
//
//     g++ -O3 -march=native benchmarks/direct_allreduce.cc -o build/direct_allreduce && build/direct_allreduce 128 20
//
// Two processes, each on a core. Each adds up half of the elements and writes the sums to both tensors, so nothing is
// copied. Prints the median for tensors of so many MiB over so many rounds, and the median of a copy of one tensor.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

template <class T>
T* shared(size_t count) {
  void* memory = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::exit(1);
  return static_cast<T*>(memory);
}

struct alignas(64) Arrivals {
  std::atomic<uint64_t> count;
};

template <class Work>
double milliseconds(const Work& work) {
  const auto begun = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begun).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const size_t count = std::strtoul(argv[1], nullptr, 10) * (1 << 20) / sizeof(float);
  const int rounds = std::atoi(argv[2]);
  auto* const arrivals = shared<Arrivals>(2);
  const std::array<float*, 2> tensors{shared<float>(count), shared<float>(count)};
  const pid_t child = fork();
  const size_t own = child == 0 ? 1 : 0;
  cpu_set_t core;
  CPU_ZERO(&core);
  CPU_SET(own, &core);
  sched_setaffinity(0, sizeof(core), &core);

  uint64_t meetings = 0;
  const auto meet = [&] {
    arrivals[own].count.store(++meetings);
    while (arrivals[1 - own].count.load() < meetings) __builtin_ia32_pause();
  };
  float* __restrict mine = tensors[own];
  float* __restrict theirs = tensors[1 - own];
  std::vector<float> copy(count);
  std::vector<double> direct, copied;
  for (int round = 0; round < rounds; ++round) {
    std::memset(mine, 0, count * sizeof(float));  // as a backward pass that has just written it
    meet();
    direct.push_back(milliseconds([&] {
      for (size_t i = own * count / 2; i < (own + 1) * count / 2; ++i) mine[i] = theirs[i] = mine[i] + theirs[i];
      meet();
    }));
    meet();
    copied.push_back(milliseconds([&] { std::copy_n(mine, count, copy.data()); }));
  }
  if (child == 0) return 0;
  waitpid(child, nullptr, 0);
  std::printf("direct %.1f ms, a copy %.1f ms\n", median(direct), median(copied));
}
