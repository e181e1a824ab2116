// The engine and the plans of optimizers.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/bucket_plan.h"
#include "engine/engine.h"
#include "engine/frontend.h"
#include "memory/sleeping_process.h"
#include "python/bindings.h"
#include "python/handles.h"
#include "timeline/record_file.h"
#include "timeline/timeline_writer.h"

namespace nb = nanobind;

namespace horovodish {

namespace {

constexpr std::chrono::milliseconds kWaitSlice{100};

nb::list failures_of(Engine& engine) {
  nb::list failures;
  for (const auto& [error, in_program] : engine.failures()) {
    failures.append(nb::make_tuple(class_name(error.kind), error.message, in_program));
  }
  return failures;
}

// Waits in slices. Python handles signals between two slices.
void settle_launched(Engine& engine) {
  const uint64_t number = engine.launched();
  if (engine.settle_launched(number, std::chrono::nanoseconds(0))) return;
  for (bool settled = false; !settled;) {
    {
      const WithoutGil without_gil(engine);
      settled = engine.settle_launched(number, kWaitSlice);
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

std::shared_ptr<Engine> make_engine(int rank, int size, size_t local_rank, size_t local_size,
                                    const std::vector<int>& arena_descriptors, std::vector<int> peer_sockets,
                                    size_t chunk_bytes, size_t ring_segment_bytes, size_t cache_capacity,
                                    int64_t spin_us, double stall_warning_seconds, double stall_shutdown_seconds,
                                    int stack_signal, std::string plane, bool shared_gpu, bool horovods_gradients,
                                    bool averages_over_size, bool has_thread) {
  EngineConfig config;
  config.has_thread = has_thread;
  config.rank = WorldRank(rank);
  config.size = size;
  config.local_rank = local_rank;
  config.local_size = local_size;
  const size_t bytes = EngineConfig::arena_layout(arena_descriptors.size(), chunk_bytes).bytes();
  for (const int descriptor : arena_descriptors) config.arena_memory.push_back(map_memory(descriptor, bytes));
  config.peer_sockets = std::move(peer_sockets);
  config.options = {chunk_bytes,
                    ring_segment_bytes,
                    cache_capacity,
                    spin_us < 0 ? std::nullopt : std::optional(std::chrono::microseconds(spin_us)),
                    {StallInspector::Seconds(stall_warning_seconds), StallInspector::Seconds(stall_shutdown_seconds)},
                    std::move(plane),
                    shared_gpu,
                    stack_signal,
                    horovods_gradients,
                    averages_over_size};
  // A forked child has neither the engine's threads nor its shared memory, so there the engine stays until the process
  // ends.
  const std::shared_ptr<Engine> engine(new Engine(std::move(config)), [process = getpid()](Engine* engine) {
    if (getpid() == process) delete engine;
  });
  set_running_engine(engine);
  return engine;
}

// How long to wait for Python's lock before a look at the stacks. A thread that runs Python code releases the lock
// within milliseconds.
constexpr std::chrono::milliseconds kLockLimit{400};

// Calls `look` while another thread holds Python's lock, so that no thread runs Python code meanwhile. Returns false if
// the lock did not come in time: native code holds it, or the machine is too busy.
bool hold_python(const std::function<void()>& look) {
  struct Hold {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_held = false, is_over = false;
  };
  static std::atomic<bool> is_waiting{false};  // a thread waits for the lock, perhaps for ever
  if (is_waiting.exchange(true)) return false;
  const auto hold = std::make_shared<Hold>();
  std::thread([hold] {
    const BackgroundThread background("hvd-stacks");
    const PyGILState_STATE state = PyGILState_Ensure();  // may never return
    is_waiting = false;
    {
      std::unique_lock lock(hold->mutex);
      hold->is_held = true;
      hold->changed.notify_all();
      hold->changed.wait(lock, [&] { return hold->is_over; });
    }
    PyGILState_Release(state);
  }).detach();
  {
    std::unique_lock lock(hold->mutex);
    if (!hold->changed.wait_for(lock, kLockLimit, [&] { return hold->is_held; })) {
      hold->is_over = true;
      return false;
    }
  }
  look();
  const std::lock_guard lock(hold->mutex);
  hold->is_over = true;
  hold->changed.notify_all();
  return true;
}

void show_status(Engine& engine, int page, int listener, int stacks, int stack_signal) {
  engine.show_status(map_memory(page, sizeof(StatusPage)), listener, stacks, stack_signal, hold_python);
}

// `about`: the JSON object at the beginning of a file of records; empty for a trace.
void start_timeline(Engine& engine, int descriptor, const std::string& name, const std::string& about, int64_t origin,
                    bool mark_cycles) {
  std::unique_ptr<Recording> recording;
  if (about.empty()) {
    recording = std::make_unique<TimelineWriter>(descriptor, number_of(engine.rank()), name, origin);
  } else {
    recording = std::make_unique<RecordFile>(descriptor, about, origin);
  }
  engine.start_timeline(std::make_shared<Timeline>(std::move(recording), mark_cycles));
}

// `mpi`: what horovodish.mpi.binding.native_table() gives.
abi::Mpi mpi_table(const nb::dict& mpi, std::vector<int> world_ranks) {
  abi::Mpi table;
  table.library = nb::cast<std::string>(mpi["library"]);
  table.communicator = nb::cast<uintptr_t>(mpi["comm"]);
  table.byte_type = nb::cast<uintptr_t>(mpi["byte"]);
  table.request_bytes = nb::cast<size_t>(mpi["request_bytes"]);
  table.status_bytes = nb::cast<size_t>(mpi["status_bytes"]);
  table.tolerates_faults = nb::cast<bool>(mpi["tolerates_faults"]);
  table.tags = abi::MpiTags(nb::cast<int>(mpi["generation"]));
  table.world_ranks = std::move(world_ranks);
  return table;
}

void add_process_set(Engine& engine, int id, std::vector<int> ranks, std::vector<std::vector<int>> hosts,
                     std::vector<size_t> local, size_t region, const std::optional<nb::dict>& mpi,
                     double longest_wait_seconds) {
  ProcessSetConfig config;
  config.own = static_cast<int>(std::find(ranks.begin(), ranks.end(), number_of(engine.rank())) - ranks.begin());
  for (const int rank : ranks) config.ranks.push_back(WorldRank(rank));
  config.hosts = std::move(hosts);
  config.local = std::move(local);
  config.region = region;
  if (mpi) config.mpi = mpi_table(*mpi, std::move(ranks));
  nb::gil_scoped_release release;
  engine.add_process_set(id, std::move(config), StallInspector::Seconds(longest_wait_seconds));
}

LatenessTable lateness_of(Engine& engine, int process_set) {
  nb::gil_scoped_release release;
  return lateness_table(engine.lateness(process_set));
}

auto code_reports_of(Engine& engine, int process_set) {
  std::vector<Residuals::Report> reports;
  {
    nb::gil_scoped_release release;
    reports = engine.code_reports(process_set);
  }
  std::vector<std::tuple<std::string, std::string, int, double, uint64_t, std::vector<double>>> table;
  for (const auto& [owner, name, kind, share, its] : reports) {
    table.emplace_back(owner, name, static_cast<int>(kind), share, its.steps,
                       std::vector{its.value_bytes, its.code_bytes, its.encode_seconds, its.decode_seconds,
                                   its.gradient_squares, its.error_squares});
  }
  return table;
}

// Keeps Python's lock. If the engine has stopped because the process ends, the thread waits for the end without the
// lock.
template <bool absent>
void submit_member(BucketPlan& plan, size_t index, uintptr_t source, uintptr_t target, uintptr_t stream) {
  try {
    plan.submit(index, reinterpret_cast<const void*>(source), reinterpret_cast<void*>(target), stream, absent);
  } catch (const EngineStopped&) {
    const WithoutGil without_gil(plan.engine());
    throw;
  }
}

void bind_plan(nb::module_& module) {
  nb::class_<BucketPlan>(module, "BucketPlan")
      .def("submit", &submit_member<false>, nb::arg("index"), nb::arg("source"), nb::arg("target"),
           nb::arg("stream") = 0)
      .def("absent", &submit_member<true>, nb::arg("index"), nb::arg("zeros"), nb::arg("target"), nb::arg("stream") = 0)
      .def(
          "order_after", [](const BucketPlan& self, uintptr_t stream) { self.order_after(stream); }, nb::arg("stream"))
      .def("flush", &BucketPlan::flush)
      .def(
          "wait",
          [](BucketPlan& self, double seconds) {
            const WithoutGil without_gil(self.engine());
            return self.wait(nanoseconds(seconds));
          },
          nb::arg("seconds"))
      .def("poll", &BucketPlan::settled)
      .def("arrived", &BucketPlan::arrived, nb::arg("bucket"), nb::arg("stream") = 0)
      .def("error", [](const BucketPlan& self) { return error_tuple(self.error()); })
      .def(
          "keep",
          [](BucketPlan& self, nb::object owner) {
            self.keep(owned(std::move(owner)));
            release_owners();
          },
          nb::arg("owner"))
      .def("absent_everywhere", &BucketPlan::absent_everywhere)
      .def("any_joined", &BucketPlan::any_joined)
      .def("reset", &BucketPlan::reset);
}

}  // namespace

LatenessTable lateness_table(const std::map<WorldRank, Lateness>& by_rank) {
  LatenessTable table;
  for (const auto& [rank, its] : by_rank)
    table[number_of(rank)] = {its.times_last, its.total_seconds, its.longest_seconds};
  return table;
}

void bind_engine(nb::module_& module) {
  bind_plan(module);
  nb::class_<Engine> engine(module, "Engine");
  bind_handles(module, engine);
  engine
      .def(nb::new_(&make_engine), nb::kw_only(), nb::arg("rank"), nb::arg("size"), nb::arg("local_rank"),
           nb::arg("local_size"), nb::arg("arena_descriptors"), nb::arg("peer_sockets"), nb::arg("chunk_bytes"),
           nb::arg("ring_segment_bytes"), nb::arg("cache_capacity"), nb::arg("spin_us"),
           nb::arg("stall_warning_seconds"), nb::arg("stall_shutdown_seconds"), nb::arg("stack_signal"),
           nb::arg("plane"), nb::arg("shared_gpu"), nb::arg("horovods_gradients"), nb::arg("averages_over_size"),
           nb::arg("has_thread") = true)
      .def_prop_ro("horovods_gradients", &Engine::horovods_gradients)
      .def("add_process_set", &add_process_set, nb::arg("id"), nb::kw_only(), nb::arg("ranks"), nb::arg("hosts"),
           nb::arg("local"), nb::arg("region"), nb::arg("mpi"), nb::arg("longest_wait_seconds"))
      .def("remove_process_set", &Engine::remove_process_set, nb::arg("id"), nb::call_guard<nb::gil_scoped_release>())
      .def("retire", &Engine::retire, nb::arg("process_set"), nb::arg("reason"),
           nb::call_guard<nb::gil_scoped_release>())
      .def("process_set_busy", &Engine::process_set_busy, nb::arg("id"), nb::call_guard<nb::gil_scoped_release>())
      .def("clear_region", &Engine::clear_region, nb::arg("region"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "refuse",
          [](Engine& self, int kind, const std::string& name, int process_set, const std::string& why) {
            self.refuse(static_cast<Kind>(kind), name, process_set, why);
          },
          nb::arg("kind"), nb::arg("name"), nb::arg("process_set"), nb::arg("why"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "plan",
          [](Engine& self, const std::string& name, int op, double prescale, double postscale,
             const std::vector<std::tuple<std::string, int, std::vector<int64_t>, size_t>>& members,
             const std::vector<int>& devices, int process_set, size_t chunk_bytes, size_t segment_bytes, int kind,
             const std::vector<std::vector<int64_t>>& ends, const std::vector<std::string>& codecs) {
            Request shared;
            shared.kind = static_cast<Kind>(kind);
            shared.by_elements = shared.kind == Kind::reducescatter || shared.kind == Kind::allgather;
            shared.name = name;
            shared.op = static_cast<ReduceOp>(op);
            shared.prescale = prescale;
            shared.postscale = postscale;
            shared.chunk_bytes = chunk_bytes;
            shared.segment_bytes = segment_bytes;
            std::vector<std::pair<Member, size_t>> planned;
            for (const auto& [member_name, dtype, shape, bucket] : members) {
              planned.emplace_back(member_of(member_name, static_cast<DType>(dtype), shape), bucket);
            }
            std::vector<Compression> compressions;
            for (const std::string& codec : codecs) compressions.push_back(compression_of(codec));
            return std::make_unique<BucketPlan>(self, shared, planned, devices, process_set, ends, compressions);
          },
          nb::arg("name"), nb::arg("op"), nb::arg("prescale"), nb::arg("postscale"), nb::arg("members"),
          nb::arg("devices"), nb::arg("process_set") = 0, nb::arg("chunk_bytes") = 0, nb::arg("segment_bytes") = 0,
          nb::arg("kind") = static_cast<int>(Kind::allreduce), nb::arg("ends") = std::vector<std::vector<int64_t>>{},
          nb::arg("codecs") = std::vector<std::string>{}, nb::keep_alive<0, 1>())
      .def("settle_launched", &settle_launched)
      .def("launched", &Engine::launched)
      .def("first_lost", &Engine::first_lost)
      .def("has_failed", &Engine::has_failed)
      .def("lateness", &lateness_of, nb::arg("process_set"))
      .def("code_reports", &code_reports_of, nb::arg("process_set"))
      .def("full_requests", &Engine::full_requests, nb::arg("process_set"), nb::call_guard<nb::gil_scoped_release>())
      .def("start_timeline", &start_timeline, nb::arg("descriptor"), nb::kw_only(), nb::arg("name"), nb::arg("about"),
           nb::arg("origin"), nb::arg("mark_cycles"), nb::call_guard<nb::gil_scoped_release>())
      .def("stop_timeline", &Engine::stop_timeline, nb::call_guard<nb::gil_scoped_release>())
      .def("mark", &Engine::mark, nb::arg("name"))
      .def("waited", &Engine::waited, nb::arg("begin_ns"))
      .def("show_status", &show_status, nb::arg("page"), nb::arg("listener"), nb::arg("stacks"),
           nb::arg("stack_signal"), nb::call_guard<nb::gil_scoped_release>())
      .def("describe_wait", &Engine::describe_wait, nb::arg("who"), nb::arg("line"))
      .def("hold_other_threads", &Engine::hold_other_threads, nb::call_guard<nb::gil_scoped_release>())
      .def("completed", &Engine::completed)
      .def("begin_step", &Engine::begin_step)
      .def("steps", &Engine::steps)
      .def("go_on_from_step", &Engine::go_on_from_step)
      .def("reduced_bytes", &Engine::reduced_bytes)
      .def("loss", &Engine::loss)
      .def("failures", &failures_of)
      .def(
          "stop",
          [](Engine& self, bool failed, const std::string& reason) {
            {
              const nb::gil_scoped_release release;
              self.stop(failed, reason);
            }
            release_owners();
          },
          nb::arg("failed"), nb::arg("reason"));
}

}  // namespace horovodish
