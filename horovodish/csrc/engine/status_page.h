// A page of memory that the rank writes and its supervisor reads. It tells about a rank whose process cannot answer,
// for example because it is stopped.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "memory/clock.h"

namespace horovodish {

// launcher/status/answers.py reads it. A reader may see a name while it is being written, so the names are only for people.
struct StatusPage {
  std::atomic<uint64_t> steps{0}, reduced_bytes{0};
  std::atomic<uint64_t> submitted{0}, ended{0};  // collectives of all process sets
  std::atomic<int64_t> submitted_at_ns{0};  // when the last one was submitted, by CLOCK_MONOTONIC
  std::array<char, 16> kind{};  // of the last one
  std::array<char, 200> name{};

  // Called by the thread that drives the engine.
  void submit(std::string_view its_kind, std::string_view its_name, Clock::time_point now) {
    write(kind, its_kind);
    write(name, its_name);
    submitted_at_ns.store(now.time_since_epoch().count(), std::memory_order_relaxed);
    submitted.store(submitted.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

 private:
  static void write(auto& to, std::string_view text) { to[text.copy(to.data(), to.size() - 1)] = '\0'; }
};
static_assert(sizeof(StatusPage) == 256);

}  // namespace horovodish
