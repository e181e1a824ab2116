// Engines as threads of one process over one mapping, for the sanitizers, which cannot see across processes.
//
//     engines RANKS STEPS
//
// Every rank runs the same random program: operations of all kinds and many sizes, asynchronous and synchronous, with
// several waiting threads, and each rank submits in its own order. The results are checked. At the end one rank refuses
// an operation, and one leaves while others wait.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "engine/bucket_plan.h"
#include "engine/frontend.h"
#include "planes/adasum.h"
#include "ranks.h"
#include "timeline/record_file.h"
#include "timeline/timeline_writer.h"

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

// Several requests share a name, and each comes again, so the response cache knows all of them. Sometimes rank 0 has
// another request than the other ranks.
void change_requests(Engine& engine, int rank, int ranks, int steps) {
  constexpr size_t kNames = 3;
  std::mt19937 own(static_cast<unsigned>(rank) + 3);
  for (size_t step = 0; step < static_cast<size_t>(steps); ++step) {
    const bool differs = ranks > 1 && step % 8 == 7;
    const size_t length = 10 + 5000 * (step % 3), own_length = length + (differs && rank == 0);
    const std::vector<float> source(own_length, static_cast<float>(rank));
    std::vector<std::vector<float>> targets(kNames, std::vector<float>(own_length));
    std::vector<std::shared_ptr<Operation>> operations;
    for (size_t i = 0; i < kNames; ++i) {
      operations.push_back(operation(engine, Kind::allreduce, "changing" + std::to_string(i), source, &targets[i], 0,
                                     step % 2 == 0 ? ReduceOp::sum : ReduceOp::max));
    }
    std::shuffle(operations.begin(), operations.end(), own);
    for (const auto& submitted : operations) engine.enqueue(submitted, own() % 2 == 0);
    for (const auto& submitted : operations) {
      wait(engine, submitted->handle);
      CHECK((submitted->handle->error() != nullptr) == differs);
    }
    const auto expected = static_cast<float>(step % 2 == 0 ? ranks * (ranks - 1) / 2 : ranks - 1);
    for (const auto& target : targets) CHECK(differs || target.back() == expected);
  }
}

void reduce_buckets(Engine& engine, int rank, int ranks, int steps) {
  constexpr size_t kTensors = 30;
  std::vector<std::pair<Member, size_t>> members;
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

// Follows operations as a shim's native code does: no thread waits, and a call in another thread reports the end of
// each.
void follow_completions(Engine& engine, int ranks) {
  constexpr size_t kTensors = 40;
  std::vector<std::vector<float>> tensors(kTensors, std::vector<float>(300, 1.0f));
  std::atomic<size_t> right{0}, ended{0};
  for (size_t i = 0; i < kTensors; ++i) {
    auto request = std::make_shared<Request>();
    request->name = "followed" + std::to_string(i);
    request->members = {{request->name, DType::float32, {300}}};
    auto* memory = reinterpret_cast<std::byte*>(tensors[i].data());
    std::shared_ptr<void> owner = std::make_shared<int>();
    const std::weak_ptr<void> owned = owner;
    submit(engine, std::move(request), {{memory, memory}}, 0, std::move(owner), [&, i, owned](const auto& handle) {
      right += handle->settled() && handle->error() == nullptr && owned.expired() &&
               tensors[i][299] == static_cast<float>(ranks);
      ++ended;
    });
  }
  while (ended < kTensors) std::this_thread::yield();
  CHECK(right == kTensors);
}

// Every rank sends more than the rings hold to every other rank, in its own order.
void transfer(Engine& engine, int rank, int ranks, int steps) {
  std::mt19937 own(static_cast<unsigned>(rank) + 7);
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<float>> sources, targets;
    sources.reserve(static_cast<size_t>(8 * ranks));
    targets.reserve(static_cast<size_t>(8 * ranks));
    std::vector<std::shared_ptr<Operation>> operations;
    for (int peer = 0; peer < ranks; ++peer) {
      for (unsigned tag = 0; tag < 8 && peer != rank; ++tag) {
        const size_t length = length_of(step, static_cast<int>(tag));
        const auto& source = sources.emplace_back(length, static_cast<float>(rank));
        auto& target = targets.emplace_back(length, -1.0f);
        operations.push_back(operation(engine, Kind::send, "sent", source, nullptr, peer, ReduceOp::sum, tag));
        operations.push_back(operation(engine, Kind::receive, "received", target, &target, peer, ReduceOp::sum, tag));
      }
    }
    std::shuffle(operations.begin(), operations.end(), own);
    for (const auto& submitted : operations) engine.enqueue(submitted, own() % 2 == 0);
    for (const auto& submitted : operations) {
      wait(engine, submitted->handle);
      CHECK(submitted->handle->error() == nullptr);
    }
    size_t next = 0;
    for (int peer = 0; peer < ranks; ++peer) {
      for (int tag = 0; tag < 8 && peer != rank; ++tag) {
        for (const float value : targets[next]) CHECK(value == static_cast<float>(peer));
        ++next;
      }
    }
  }
}

// A message that does not fit its receive fails on both ranks. A receive without a message is cancelled. The next
// messages arrive. If there were only two ranks, each would send its refusal behind its own message, which may be the
// end of the other rank's send.
void refuse_transfers(Engine& engine, int rank, int ranks) {
  constexpr size_t kLength = 200000;  // more than a ring holds, so the refusal comes before the send ends
  const int following = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  const std::vector<float> source(kLength, static_cast<float>(rank));
  std::vector<float> target(kLength);
  for (const bool fits : {false, true}) {
    std::vector<float> short_target(kLength - 1), never(1);
    const auto sends = operation(engine, Kind::send, "sent", source, nullptr, following);
    const auto receives = operation(engine, Kind::receive, "received", fits ? target : short_target,
                                    fits ? &target : &short_target, fits ? number_of(Request::kAnyRank) : previous);
    const auto waits = operation(engine, Kind::receive, "never", never, &never, previous, ReduceOp::sum, 9);
    for (const auto& submitted : {waits, sends, receives}) engine.enqueue(submitted, true);
    std::thread another([&] { wait(engine, waits->handle); });
    for (const auto& submitted : {sends, receives}) {
      wait(engine, submitted->handle);
      CHECK((submitted->handle->error() == nullptr) == fits);
    }
    CHECK(engine.cancel(*waits->handle));
    another.join();
    CHECK(waits->handle->error() != nullptr);
  }
  CHECK(target.back() == static_cast<float>(previous));
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

std::shared_ptr<Timeline> trace(int rank) {
  return std::make_shared<Timeline>(
      std::make_unique<TimelineWriter>(memfd_create("trace", MFD_CLOEXEC), rank, "rank " + std::to_string(rank), 0),
      true);
}

std::shared_ptr<Timeline> records() {
  return std::make_shared<Timeline>(std::make_unique<RecordFile>(memfd_create("records", MFD_CLOEXEC), "{}", 0), true);
}

void lose_a_rank(Engine& engine, int rank) {
  if (rank == 1) return engine.stop(true, "rank 1 raised something");
  const std::vector<float> source(1000);
  std::vector<float> target(1000);
  auto submitted = operation(engine, Kind::allreduce, "without rank 1", source, &target);
  const std::shared_ptr<void> memory = std::make_shared<int>();
  submitted->memory = memory;
  const auto handle = submitted->handle;
  engine.enqueue(std::move(submitted), false);
  wait(engine, handle);
  CHECK(handle->error() != nullptr && handle->error()->kind == ErrorKind::rank_lost);
  CHECK(handle->error()->message.find("rank 1 raised something") != std::string::npos);
  CHECK(memory.use_count() == 1);
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
        engine.start_timeline(i == 1 ? records() : trace(rank));
        train(engine, rank, ranks, steps / 4);
        engine.stop_timeline();
      }
      engine.start_timeline(trace(rank));  // ends with the engine
      change_requests(engine, rank, ranks, steps);
      reduce_buckets(engine, rank, ranks, steps);
      reduce_by_adasum(engine, rank, ranks);
      follow_completions(engine, ranks);
      transfer(engine, rank, ranks, steps / 2);
      if (ranks > 2) refuse_transfers(engine, rank, ranks);
      refuse(engine, rank);
      if (ranks > 1) lose_a_rank(engine, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d ranks, %d steps: fine\n", ranks, steps);
}
