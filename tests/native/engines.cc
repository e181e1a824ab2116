// Engines as threads of one process over one mapping, for the sanitizers, which cannot see across processes.
//
//     engines RANKS STEPS
//
// Every rank runs the same random program: operations of all kinds and many sizes, asynchronous and synchronous, waited
// for by several threads, submitted in an order of its own. The results are checked. At the end one refuses an
// operation, and one leaves while others wait.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "engine/bucket_plan.h"
#include "engine/frontend.h"
#include "planes/adasum.h"
#include "ranks.h"

using namespace horovodish;

namespace {

size_t length_of(int step, int tensor) {
  std::mt19937 random(static_cast<unsigned>(step * 1000 + tensor));
  return std::uniform_int_distribution<size_t>(0, tensor % 3 == 0 ? 40000 : 300)(random);
}

void train(Engine& engine, int rank, int ranks, int steps) {
  std::mt19937 own(static_cast<unsigned>(rank));
  constexpr int kTensors = 12;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> sources(kTensors), targets(kTensors);
    std::vector<std::shared_ptr<Handle>> handles(kTensors);
    std::vector<int> order(kTensors);
    for (int i = 0; i < kTensors; ++i) {
      order[static_cast<size_t>(i)] = i;
      sources[static_cast<size_t>(i)].assign(length_of(step, i), static_cast<float>(rank + i));
      targets[static_cast<size_t>(i)].resize(sources[static_cast<size_t>(i)].size());
    }
    std::shuffle(order.begin(), order.end(), own);
    for (const int i : order) {
      const auto at = static_cast<size_t>(i);
      const Kind kind = i % 4 == 3 ? Kind::broadcast : i % 4 == 2 ? Kind::allgather : Kind::allreduce;
      auto submitted = operation(engine, kind, "tensor" + std::to_string(i), sources[at],
                                 kind == Kind::allgather ? nullptr : &targets[at], i % ranks);
      handles[at] = submitted->handle;
      engine.enqueue(std::move(submitted), own() % 2 == 0);
    }
    std::thread another([&] {
      for (size_t i = 0; i < kTensors; i += 2) wait(engine, handles[i]);
    });
    for (size_t i = 1; i < kTensors; i += 2) wait(engine, handles[i]);
    another.join();
    for (int i = 0; i < kTensors; ++i) {
      const auto at = static_cast<size_t>(i);
      CHECK(handles[at]->error() == nullptr);
      if (i % 4 == 2) {
        CHECK(handles[at]->outputs[0].bytes == sources[at].size() * sizeof(float) * static_cast<size_t>(ranks));
        continue;
      }
      const float expected =
          i % 4 == 3 ? static_cast<float>(i % ranks + i) : static_cast<float>(ranks * i + ranks * (ranks - 1) / 2);
      for (const float value : targets[at]) CHECK(value == expected);
    }
  }
}

void reduce_buckets(Engine& engine, int rank, int ranks, int steps) {
  constexpr size_t kTensors = 30;
  std::vector<BucketPlan::PlannedMember> members;
  std::vector<std::vector<float>> gradients(kTensors, std::vector<float>(257));
  for (size_t i = 0; i < kTensors; ++i) {
    members.push_back({{"gradient" + std::to_string(i), DType::float32, {257}}, i / 7});
  }
  Request shared;
  shared.name = "plan";
  BucketPlan plan(engine, shared, members, {Request::kHost}, 0);
  std::mt19937 own(static_cast<unsigned>(rank) + 99);
  for (int step = 0; step < steps; ++step) {
    std::vector<size_t> order(kTensors);
    for (size_t i = 0; i < kTensors; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), own);
    for (const size_t i : order) {
      std::fill(gradients[i].begin(), gradients[i].end(), static_cast<float>(rank));
      plan.submit(i, gradients[i].data(), gradients[i].data());
    }
    plan.flush();
    while (!plan.wait(std::chrono::milliseconds(20))) {
    }
    CHECK(plan.error() == nullptr);
    plan.reset();
    for (const auto& gradient : gradients) {
      for (const float value : gradient) CHECK(value == static_cast<float>(ranks * (ranks - 1) / 2));
    }
  }
}

void reduce_by_adasum(Engine& engine, int rank, int ranks) {
  std::vector<double> products;
  for (int i = 1; i <= ranks; ++i) {
    for (int j = i; j <= ranks; ++j) products.push_back(i * j);
  }
  const auto coefficients = adasum_coefficients(products.data(), static_cast<size_t>(ranks));
  double expected = 0;
  for (int i = 0; i < ranks; ++i) expected += coefficients[static_cast<size_t>(i)] * (i + 1);
  for (const size_t length : {1, 33, 40000}) {
    const std::vector<float> source(length, static_cast<float>(rank + 1));
    std::vector<float> target(length);
    auto submitted = operation(engine, Kind::allreduce, "adasum", source, &target, 0, ReduceOp::adasum);
    const auto handle = submitted->handle;
    engine.enqueue(std::move(submitted), false);
    wait(engine, handle);
    CHECK(handle->error() == nullptr);
    for (const float value : target) CHECK(std::abs(value - expected) < 1e-5 * expected);
  }
}

// As native code of a shim does it: nobody waits, and a call in another thread says when each has ended.
void follow_completions(Engine& engine, int ranks) {
  constexpr size_t kTensors = 40;
  std::vector<std::vector<float>> tensors(kTensors, std::vector<float>(300, 1.0f));
  std::atomic<size_t> right{0}, ended{0};
  for (size_t i = 0; i < kTensors; ++i) {
    auto request = std::make_shared<Request>();
    request->name = "followed" + std::to_string(i);
    request->members = {{request->name, DType::float32, {300}}};
    auto* memory = reinterpret_cast<std::byte*>(tensors[i].data());
    submit(engine, std::move(request), {{memory, memory}}, 0, [&, i](const Handle& handle) {
      right += handle.settled() && handle.error() == nullptr && tensors[i][299] == static_cast<float>(ranks);
      ++ended;
    });
  }
  while (ended < kTensors) std::this_thread::yield();
  CHECK(right == kTensors);
}

void refuse(Engine& engine, int rank) {
  const std::vector<float> source(10);
  std::vector<float> target(10);
  for (const bool again : {false, true}) {
    if (rank == 0 && !again) {
      engine.refuse(Kind::allreduce, "refused", 0, "it is Monday");
      continue;
    }
    auto submitted = operation(engine, Kind::allreduce, "refused", source, &target);
    const auto handle = submitted->handle;
    engine.enqueue(std::move(submitted), false);
    wait(engine, handle);
    CHECK((handle->error() == nullptr) == again);
  }
}

TimelineConfig timeline(int rank) {
  return {memfd_create("timeline", MFD_CLOEXEC), rank, "rank " + std::to_string(rank), 0, true};
}

void lose_a_rank(Engine& engine, int rank) {
  if (rank == 1) return engine.stop(true, "rank 1 raised something");
  const std::vector<float> source(1000);
  std::vector<float> target(1000);
  auto submitted = operation(engine, Kind::allreduce, "without rank 1", source, &target);
  const auto handle = submitted->handle;
  engine.enqueue(std::move(submitted), false);
  wait(engine, handle);
  CHECK(handle->error() != nullptr && handle->error()->kind == ErrorKind::rank_lost);
  CHECK(handle->error()->message.find("rank 1 raised something") != std::string::npos);
  CHECK(!handle->memory_abandoned());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: engines RANKS STEPS\n");
    return 2;
  }
  const int ranks = std::atoi(argv[1]), steps = std::atoi(argv[2]);
  const Host host(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Engine engine(host.config(rank));
      engine.add_process_set(0, host.everybody(rank));
      train(engine, rank, ranks, steps);
      for (int i = 0; i < 3; ++i) {  // while others still work
        engine.start_timeline(timeline(rank));
        train(engine, rank, ranks, steps / 4);
        engine.stop_timeline();
      }
      engine.start_timeline(timeline(rank));  // ends with the engine
      reduce_buckets(engine, rank, ranks, steps);
      reduce_by_adasum(engine, rank, ranks);
      follow_completions(engine, ranks);
      refuse(engine, rank);
      if (ranks > 1) lose_a_rank(engine, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d ranks, %d steps: fine\n", ranks, steps);
}
