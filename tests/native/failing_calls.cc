// A small run of two ranks in which the system refuses one call: the first allocation, then the second, then the third,
// and so on. The same for the start of threads. Each run must end, in results or in errors, without a crash.
//
//     failing_calls                                     all of them
//     failing_calls allocations|threads FIRST COUNT     one run, for a debugger: COUNT fail from number FIRST on
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <map>
#include <new>
#include <stdexcept>
#include <thread>

#include "engine/frontend.h"
#include "ranks.h"
#include "timeline/record_file.h"
#include "timeline/timeline_writer.h"

namespace {

// The calls that fail: `count` of them from number `first` on. They are counted while that is not 0.
struct Failing {
  std::atomic<long> calls{0};
  std::atomic<long> first{0};
  long count = 1;

  bool next() {
    if (first == 0) return false;
    const long call = ++calls;
    return call >= first && call < first + count;
  }
} allocations, thread_starts;

}  // namespace

void* operator new(size_t bytes) {
  if (allocations.next()) throw std::bad_alloc();
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  if (thread_starts.next()) return EAGAIN;
  static const auto next = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return next(thread, attributes, run, argument);
}

using namespace horovodish;

namespace {

constexpr unsigned kLimitSeconds = 30;
constexpr int kNotReached = 3;
constexpr int kAtOnce = 4;

void finish(Engine& engine, const std::shared_ptr<Handle>& handle) {
  wait(engine, handle);
  if (handle->error() != nullptr) throw std::runtime_error(handle->error()->message);
}

void call(Engine& engine, Kind kind, const std::string& name, size_t length) {
  const std::vector<float> source(length, 1.0f);
  std::vector<float> target(length);
  auto submitted = operation(engine, kind, name, source, kind == Kind::allgather ? nullptr : &target);
  const auto handle = submitted->handle;
  engine.enqueue(std::move(submitted), true);
  finish(engine, handle);
}

// Follows operations as a shim does. The memory must stay until the call, which must come in any case.
void follow(Engine& engine) {
  std::vector<float> memory(10, 1.0f);
  std::atomic<bool> called{false};
  auto request = std::make_shared<Request>();
  request->name = "followed";
  request->members = {{request->name, DType::float32, {10}}};
  auto* data = reinterpret_cast<std::byte*>(memory.data());
  const auto handle =
      submit(engine, std::move(request), {{data, data}}, 0, nullptr, [&](const auto&) { called = true; });
  while (!called) std::this_thread::yield();
  finish(engine, handle);
}

void join(Engine& engine) {
  auto request = std::make_shared<Request>();
  request->kind = Kind::join;
  request->name = "join";
  const auto joins = operation_of(request, {}, 0, engine.make_handle());
  engine.enqueue(joins, true);
  finish(engine, joins->handle);
}

void work(Engine& engine, const Host& host, int rank) {
  engine.add_process_set(0, host.everybody(rank));
  call(engine, Kind::allreduce, "a", 10);
  call(engine, Kind::allgather, "b", 10);
  engine.start_timeline(std::make_shared<Timeline>(
      std::make_unique<TimelineWriter>(memfd_create("trace", MFD_CLOEXEC), rank, "a rank", 0), true));
  for (int step = 0; step < 2; ++step) call(engine, Kind::broadcast, "c", 40000);
  engine.stop_timeline();
  engine.start_timeline(
      std::make_shared<Timeline>(std::make_unique<RecordFile>(memfd_create("records", MFD_CLOEXEC), "{}", 0), true));
  call(engine, Kind::broadcast, "c", 40000);
  engine.stop_timeline();
  follow(engine);
  if (rank == 0) engine.refuse(Kind::allreduce, "refused", 0, "it is Monday");
  if (rank == 1) {
    const std::vector<float> source(1);
    std::vector<float> target(1);
    auto submitted = operation(engine, Kind::allreduce, "refused", source, &target);
    const auto handle = submitted->handle;
    engine.enqueue(std::move(submitted), false);
    wait(engine, handle);
  }
  if (rank == 0) call(engine, Kind::allreduce, "without rank 1", 10);
  join(engine);
}

void live(const Host& host, int rank) {
  std::unique_ptr<Engine> engine;
  bool failed = false;
  try {
    engine = std::make_unique<Engine>(host.config(rank));
    work(*engine, host, rank);
  } catch (const std::exception&) {
    failed = true;
  }
  if (engine) engine->stop(failed, "it failed");
  engine.reset();
  host.end(rank);
}

// The stack of the thread that ends the process; `addr2line -Cfe failing_calls` names the functions.
void show_stack() {
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), STDERR_FILENO);
  std::abort();
}

int run(Failing& failing, long first, long count) {
  std::set_terminate(show_stack);
  alarm(kLimitSeconds);
  const Host host(2);
  std::atomic<bool> begins{false};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      while (!begins) std::this_thread::yield();
      live(host, rank);
    });
  }
  failing.count = count;
  failing.first = first;
  begins = true;
  for (std::thread& rank : ranks) rank.join();
  failing.first = 0;
  return failing.calls < first ? kNotReached : 0;
}

// Each run is a process of its own, which may crash or hang.
long run_all(Failing& failing, const char* what, long count) {
  std::map<pid_t, long> running;
  bool ended = false;
  long first = 0;
  const auto collect = [&] {
    int status = 0;
    const pid_t pid = ::wait(&status);
    const long number = running.at(pid);
    running.erase(pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNotReached) ended = true;
    if (WIFEXITED(status) && (WEXITSTATUS(status) == 0 || ended)) return;
    std::fprintf(stderr, "%s %ld of a run, %ld in all: %s %d\n", what, number, count,
                 WIFSIGNALED(status) ? "signal" : "status",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    std::exit(1);
  };
  while (!ended) {
    const pid_t pid = fork();
    if (pid == 0) _exit(run(failing, first + 1, count));
    running[pid] = ++first;
    if (running.size() == kAtOnce) collect();
  }
  while (!running.empty()) collect();
  return first;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 4) return run(argv[1][0] == 'a' ? allocations : thread_starts, std::atol(argv[2]), std::atol(argv[3]));
  for (const long count : {1, 20}) {
    const long starts = run_all(thread_starts, "start of a thread", count);
    const long memory = run_all(allocations, "allocation", count);
    std::printf("%ld allocations and %ld starts of threads, %ld at a time: fine\n", memory, starts, count);
  }
}
