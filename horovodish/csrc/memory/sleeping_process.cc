#include "memory/sleeping_process.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>

namespace horovodish {

namespace {

constexpr const char* kThreads = "/proc/self/task";

std::mutex background_mutex;
std::vector<int> background;  // guarded by background_mutex

bool is_background(int thread) {
  std::lock_guard lock(background_mutex);
  return std::find(background.begin(), background.end(), thread) != background.end();
}

// The number of a thread that has ended may become that of another one.
void forget_others(const std::vector<int>& threads) {
  std::lock_guard lock(background_mutex);
  std::erase_if(background,
                [&](int thread) { return std::find(threads.begin(), threads.end(), thread) == threads.end(); });
}

// Some threads of XLA and TensorFlow look around from time to time. Their mutexes are Abseil's, which calls the kernel by syscall(),
// and they sleep by nanosleep(). Python's threads use other functions of the C library to wait for a time.
bool is_in_syscall(uint64_t instruction) {
  constexpr uint64_t kLongest = 64;
  const auto begin = reinterpret_cast<uint64_t>(&syscall);
  return instruction >= begin && instruction < begin + kLongest;
}

std::string name_of(const std::filesystem::path& thread) {
  std::string name;
  std::getline(std::ifstream(thread / "comm"), name);
  return name;
}

bool sleeps_until_woken(const std::filesystem::path& thread) {
  std::ifstream file(thread / "syscall");  // "running", or the number of a call, six arguments, stack and instruction
  long number = -1;
  std::array<uint64_t, 8> arguments{};
  file >> number >> std::hex;
  for (uint64_t& argument : arguments) file >> argument;
  if (!file) return false;
  if (number == SYS_clock_nanosleep) return arguments[0] == CLOCK_REALTIME && arguments[1] == 0;
  const uint64_t operation = arguments[1], timeout = arguments[3];
  const uint64_t command = operation & static_cast<uint64_t>(FUTEX_CMD_MASK);
  // A futex that other processes may wake has no private flag.
  const bool is_private = (operation & FUTEX_PRIVATE_FLAG) != 0;
  const bool waits = command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET;
  if (number != SYS_futex || !is_private || !waits) return false;
  return timeout == 0 || is_in_syscall(arguments.back()) || name_of(thread) == kCompletionThread;
}

struct Runs {
  std::chrono::nanoseconds time{};  // also that for which it waited for a core
  uint64_t number = 0;
};

// How long and how often a thread has run.
std::optional<Runs> runs_of(const std::filesystem::path& thread) {
  std::ifstream file(thread / "schedstat");
  int64_t ran = 0, waited = 0;
  Runs runs;
  if (!(file >> ran >> waited >> runs.number)) return std::nullopt;
  runs.time = std::chrono::nanoseconds(ran + waited);
  return runs;
}

// The threads of this process with their folders, but for the calling one, those that wait and those in the background.
std::map<int, std::filesystem::path> other_threads(const std::vector<int>& waiting) {
  std::map<int, std::filesystem::path> others;
  std::vector<int> all;
  for (const auto& entry : std::filesystem::directory_iterator(kThreads)) {
    const std::string text = entry.path().filename();
    int thread = 0;
    std::from_chars(text.data(), text.data() + text.size(), thread);
    all.push_back(thread);
    if (thread == gettid() || is_background(thread)) continue;
    if (std::find(waiting.begin(), waiting.end(), thread) == waiting.end()) others[thread] = entry.path();
  }
  forget_others(all);
  return others;
}

// By thread, how often it has run. Nothing where one of them does not sleep.
std::optional<std::map<int, uint64_t>> sleepers(const std::vector<int>& waiting) {
  std::map<int, uint64_t> found;
  for (const auto& [thread, folder] : other_threads(waiting)) {
    const auto runs = runs_of(folder);
    if (!runs || !sleeps_until_woken(folder)) return std::nullopt;
    found[thread] = runs->number;
  }
  return found;
}

}  // namespace

void add_background_thread(int thread) noexcept {
  std::lock_guard lock(background_mutex);
  try {
    background.push_back(thread);
  } catch (const std::bad_alloc&) {  // then it counts as one that may submit
  }
}

void remove_background_thread(int thread) noexcept {
  std::lock_guard lock(background_mutex);
  std::erase(background, thread);
}

BackgroundThread::BackgroundThread() { add_background_thread(gettid()); }

BackgroundThread::~BackgroundThread() { remove_background_thread(gettid()); }

// One look at thread after thread could miss that the last one wakes the first. No thread has run from the first look to the
// second if all have run equally often at both, so there was a moment when all of them slept.
bool process_sleeps(const std::vector<int>& waiting) {
  try {
    const auto first = sleepers(waiting);
    return first && first == sleepers(waiting);
  } catch (const std::exception&) {  // a thread has ended meanwhile, or there is no memory
    return false;
  }
}

bool ComputingThreads::look(const std::vector<int>& waiting) {
  std::map<int, std::chrono::nanoseconds> times;
  const auto now = std::chrono::steady_clock::now();
  bool computes = false;
  try {
    for (const auto& [thread, folder] : other_threads(waiting)) {
      const auto runs = runs_of(folder);
      if (!runs) continue;
      times[thread] = runs->time;
      const auto before = times_.find(thread);
      computes |= before != times_.end() && kShare * (runs->time - before->second) > now - looked_;
    }
  } catch (const std::exception&) {  // a thread has ended meanwhile
  }
  times_ = std::move(times);
  looked_ = now;
  return computes;
}

}  // namespace horovodish
