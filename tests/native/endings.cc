// How engines end, and what must not hold them up.
//
//     endings RANKS
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/frontend.h"
#include "ranks.h"

using namespace horovodish;

namespace {

using Clock = std::chrono::steady_clock;

// Every rank stops while some of its threads wait for operations that never come about, others submit more, and one
// clears memory that no process set has.
void stop_under_threads(int ranks) {
  const Host host(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Engine engine(host.config(rank));
      engine.add_process_set(0, host.everybody(rank));
      std::atomic<int> begun{0};
      std::vector<std::thread> others;
      for (int i = 0; i < 4; ++i) {
        others.emplace_back([&, i] {
          const std::vector<float> source(100);
          std::vector<float> target(100);
          const std::string name = "rank " + std::to_string(rank) + " thread " + std::to_string(i) + " number ";
          try {
            for (int number = 0;; ++number) {
              auto submitted = operation(engine, Kind::allreduce, name + std::to_string(number), source, &target);
              const auto handle = submitted->handle;
              engine.enqueue(std::move(submitted), i % 2 == 0);
              if (number == 3) ++begun;
              if (i % 2 == 0 && number > 3) wait(engine, handle);
            }
          } catch (const EngineStopped&) {
          }
        });
      }
      while (begun < 4) std::this_thread::yield();
      std::atomic<bool> stopped{false};
      others.emplace_back([&] {
        for (; !stopped; std::this_thread::yield()) engine.clear_region(1);
      });
      engine.stop(false, "enough");
      stopped = true;
      for (std::thread& thread : others) thread.join();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A peer that reads nothing of one process set does not keep the farewell from the peers of another set.
void say_farewell_in_every_set() {
  const Host host(2);
  Engine engine(host.config(1));
  for (const int id : {0, 1}) engine.add_process_set(id, host.everybody(1, static_cast<size_t>(id)));
  const std::string why(ControlRing::kCapacity / 50, 'x');
  for (int i = 0; i < 100; ++i)
    engine.refuse(Kind::allreduce, "x" + std::to_string(i), 0, why);  // more than the ring holds
  const Arena arena(host.memory(), 0, EngineConfig::arena_layout(2, Host::kChunkBytes));
  while (arena.control_ring(0, 1, 0).written_bytes < ControlRing::kCapacity) std::this_thread::yield();
  engine.stop(false, "enough");
  CHECK(arena.control_ring(1, 1, 0).written_bytes > 0);
}

// What follows an operation may wait for what follows another one that ends later.
void block_all_completions() {
  constexpr int kBlocked = 40;
  const Host host(1);
  Engine engine(host.config(0));
  engine.add_process_set(0, host.everybody(0));
  std::mutex mutex;
  std::condition_variable changed;
  bool last_called = false;
  std::atomic<int> ended{0};
  std::vector<float> memory(1);
  const auto follow = [&](const std::string& name, Then then) {
    auto request = std::make_shared<Request>();
    request->name = name;
    request->members = {{name, DType::float32, {1}}};
    auto* data = reinterpret_cast<std::byte*>(memory.data());
    submit(engine, std::move(request), {{data, data}}, 0, nullptr, std::move(then));
  };
  for (int i = 0; i < kBlocked; ++i) {
    follow("blocked" + std::to_string(i), [&](const std::shared_ptr<Handle>&) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return last_called; });
      ++ended;
    });
  }
  follow("last", [&](const std::shared_ptr<Handle>&) {
    std::lock_guard lock(mutex);
    last_called = true;
    changed.notify_all();
  });
  const auto limit = Clock::now() + std::chrono::seconds(20);
  while (ended < kBlocked && Clock::now() < limit) std::this_thread::yield();
  CHECK(ended == kBlocked);
}

// A rank ends its part in a process set while every rank has operations under way there. They fail on every rank, the global set goes
// on, and a new set may then have the memory of the old one.
void retire_under_operations(int ranks) {
  constexpr int kRetired = 1, kNext = 2;
  constexpr size_t kRegion = 1, kLength = 30000;
  const std::string reason = "rank 0 has had enough";
  const Host host(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Engine engine(host.config(rank));
      const std::vector<float> source(kLength, 1.0f);
      const auto reduce = [&](int process_set) {
        std::vector<float> target(kLength);
        auto submitted = operation(engine, Kind::allreduce, "of all", source, &target);
        submitted->process_set = process_set;
        const auto handle = submitted->handle;
        engine.enqueue(std::move(submitted), true);
        wait(engine, handle);
        if (handle->error() == nullptr) CHECK(target[kLength - 1] == static_cast<float>(ranks));
        return handle;
      };
      const auto transfer = [&](Kind kind, int peer) {
        std::vector<float> memory(kLength, 1.0f);
        auto submitted = operation(engine, kind, "of two", memory, &memory, peer);
        submitted->process_set = kRetired;
        const auto handle = submitted->handle;
        engine.enqueue(std::move(submitted), true);
        wait(engine, handle);
        return handle;
      };
      engine.add_process_set(0, host.everybody(rank));
      engine.add_process_set(kRetired, host.everybody(rank, kRegion));
      std::atomic<int> reduced{0};
      const auto until_error = [&](auto act) {
        while (true) {
          const auto handle = act();
          if (handle->error() == nullptr) continue;
          CHECK(handle->error()->kind == ErrorKind::internal);
          CHECK(handle->error()->message.find(reason) != std::string::npos);
          return;
        }
      };
      std::vector<std::thread> others;
      others.emplace_back(until_error, [&] { return ++reduced, reduce(kRetired); });
      others.emplace_back(until_error, [&] { return transfer(Kind::send, (rank + 1) % ranks); });
      others.emplace_back(until_error, [&] { return transfer(Kind::receive, (rank + ranks - 1) % ranks); });
      if (rank == 0) {
        while (reduced < 5) std::this_thread::yield();
        engine.retire(kRetired, reason);
      }
      for (std::thread& thread : others) thread.join();
      CHECK(reduce(0)->error() == nullptr);
      CHECK(!engine.process_set_busy(kRetired));
      engine.remove_process_set(kRetired);
      CHECK(reduce(0)->error() == nullptr);  // every rank has removed it
      engine.clear_region(kRegion);
      CHECK(reduce(0)->error() == nullptr);
      engine.add_process_set(kNext, host.everybody(rank, kRegion));
      CHECK(reduce(0)->error() == nullptr);
      CHECK(reduce(kNext)->error() == nullptr);
      CHECK(reduce(0)->error() == nullptr);  // nobody leaves while another one needs it
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: endings RANKS\n");
    return 2;
  }
  for (int i = 0; i < 20; ++i) stop_under_threads(std::atoi(argv[1]));
  for (int i = 0; i < 20; ++i) retire_under_operations(std::atoi(argv[1]));
  say_farewell_in_every_set();
  block_all_completions();
  std::printf("endings of %s ranks: fine\n", argv[1]);
}
