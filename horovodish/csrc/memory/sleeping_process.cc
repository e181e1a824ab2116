#include "memory/sleeping_process.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <sstream>
#include <string>

#include "memory/thread_setup.h"

namespace horovodish {

namespace {

constexpr const char* kThreads = "/proc/self/task";

std::mutex background_mutex;
std::vector<int> background;  // guarded by background_mutex

// Some threads of XLA and TensorFlow look around from time to time. They sleep by nanosleep(), in threads whose names
// begin with "tf_", or wait for a mutex of Abseil, which calls the kernel by syscall(). Python's threads use other
// functions of the C library for timed waits.
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

// Reads memory of this process at an address that may no longer be mapped, such as the stack of another thread.
template <class T>
bool copy_memory(uint64_t address, T& to) {
  const int file = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  if (file < 0) return false;
  const bool copied = pread(file, &to, sizeof to, static_cast<off_t>(address)) == ssize_t{sizeof to};
  close(file);
  return copied;
}

struct Mapping {
  uint64_t begin = 0, end = 0;
  std::string file;
};

// The mappings of this process that hold code.
std::vector<Mapping> code() {
  std::vector<Mapping> found;
  std::ifstream maps("/proc/self/maps");  // "begin-end rights offset device inode file"
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    Mapping mapping;
    char dash = 0;
    std::string rights, skipped;
    words >> std::hex >> mapping.begin >> dash >> mapping.end;
    words >> rights >> skipped >> skipped >> skipped >> mapping.file;
    if (rights.find('x') != std::string::npos) found.push_back(mapping);
  }
  return found;
}

// Returns whether TensorFlow's code has called the C library function that a thread is in.
bool is_called_by_tensorflow(uint64_t stack, uint64_t instruction) {
  std::array<uint64_t, 32> words{};
  if (!copy_memory(stack, words)) return false;
  const std::vector<Mapping> mappings = code();
  const auto file_of = [&](uint64_t address) {
    const auto found = std::find_if(mappings.begin(), mappings.end(), [&](const Mapping& mapping) {
      return mapping.begin <= address && address < mapping.end;
    });
    return found == mappings.end() ? std::string() : found->file;
  };
  const std::string own = file_of(instruction);
  for (const uint64_t word : words) {
    const std::string file = file_of(word);
    if (!file.empty() && file != own) return file.find("/libtensorflow") != std::string::npos;
  }
  return false;
}

// A thread of TensorFlow's input pipeline logs how much memory it uses. It has no name and sleeps for 30 seconds at a
// time. Threads that wait before a retry sleep for less, or for a random time. Python's code may call the C library,
// but not TensorFlow's sleep.
bool only_looks_around(uint64_t request, uint64_t stack, uint64_t instruction) {
  constexpr time_t kLong = 10;
  timespec duration{};
  return copy_memory(request, duration) && duration.tv_sec >= kLong && duration.tv_nsec == 0 &&
         is_called_by_tensorflow(stack, instruction);
}

bool sleeps_until_woken(const std::filesystem::path& thread) {
  std::ifstream file(thread / "syscall");  // "running", or the number of a call, six arguments, stack and instruction
  long number = -1;
  std::array<uint64_t, 8> arguments{};
  file >> number >> std::hex;
  for (uint64_t& argument : arguments) file >> argument;
  if (!file) return false;
  if (number == SYS_clock_nanosleep) {
    const bool is_nanosleep = arguments[0] == CLOCK_REALTIME && arguments[1] == 0;
    return is_nanosleep &&
           (name_of(thread).starts_with("tf_") || only_looks_around(arguments[2], arguments[6], arguments[7]));
  }
  const uint64_t operation = arguments[1], timeout = arguments[3];
  const uint64_t command = operation & static_cast<uint64_t>(FUTEX_CMD_MASK);
  // A futex that other processes may wake has no private flag.
  const bool is_private = (operation & FUTEX_PRIVATE_FLAG) != 0;
  const bool waits = command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET;
  if (number != SYS_futex || !is_private || !waits) return false;
  return timeout == 0 || is_in_syscall(arguments.back()) || name_of(thread) == kCompletionThread;
}

// How often a thread has run.
std::optional<uint64_t> runs_of(const std::filesystem::path& thread) {
  std::ifstream file(thread / "schedstat");
  uint64_t ran = 0, waited = 0, runs = 0;
  return file >> ran >> waited >> runs ? std::optional(runs) : std::nullopt;
}

// The threads of this process with their folders, without the waiting ones and those in the background.
std::map<int, std::filesystem::path> other_threads(const std::vector<int>& waiting) {
  std::map<int, std::filesystem::path> threads;
  for (const auto& entry : std::filesystem::directory_iterator(kThreads)) {
    const std::string text = entry.path().filename();
    int thread = 0;
    std::from_chars(text.data(), text.data() + text.size(), thread);
    threads[thread] = entry.path();
  }
  {
    std::lock_guard lock(background_mutex);
    // One that has ended is forgotten: a new thread may get its number.
    std::erase_if(background, [&](int thread) { return threads.erase(thread) == 0; });
  }
  for (const int thread : waiting) threads.erase(thread);
  return threads;
}

// How often each thread has run. None if a thread does not sleep.
std::optional<std::map<int, uint64_t>> sleepers(const std::vector<int>& waiting) {
  std::map<int, uint64_t> found;
  for (const auto& [thread, folder] : other_threads(waiting)) {
    const auto runs = runs_of(folder);
    if (!runs || !sleeps_until_woken(folder)) return std::nullopt;
    found[thread] = *runs;
  }
  return found;
}

}  // namespace

void add_background_thread(int thread) noexcept {
  std::lock_guard lock(background_mutex);
  try {
    background.push_back(thread);
  } catch (const std::bad_alloc&) {  // it then counts as a process that may submit
  }
}

void remove_background_thread(int thread) noexcept {
  std::lock_guard lock(background_mutex);
  std::erase(background, thread);
}

BackgroundThread::BackgroundThread(const char* name) {
  set_up_thread(name);
  add_background_thread(gettid());
}

BackgroundThread::~BackgroundThread() { remove_background_thread(gettid()); }

// One look at thread after thread could miss that the last one wakes the first. If every thread has run equally often
// at the first look and at the second, no thread has run in between, so there was a moment when all of them slept.
bool process_sleeps(const std::vector<int>& waiting) {
  try {
    const auto first = sleepers(waiting);
    return first && first == sleepers(waiting);
  } catch (const std::exception&) {  // a thread has ended meanwhile, or there is no memory
    return false;
  }
}

}  // namespace horovodish
