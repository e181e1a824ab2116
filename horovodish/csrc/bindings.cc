// The engine as a Python extension module. The only file that knows Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "abi/mpi_exit.h"
#include "abi/mpi_requests.h"
#include "c_interface.h"
#include "engine/bucket_plan.h"
#include "engine/engine.h"
#include "engine/frontend.h"
#include "engine/operation_table.h"
#include "gpu/device.h"
#include "negotiation/tree.h"
#include "planes/mpi/schedule.h"
#include "planes/nccl/nccl_launch.h"
#include "planes/shards.h"
#include "timeline/timeline_writer.h"
#include "xla/xla_call.h"
#include "xla/xla_handlers.h"

namespace py = pybind11;

namespace horovodish {

namespace {

// Instance of a class in horovodish.errors, for pybind11 to raise.
void raise(const char* class_name, const char* message) {
  const py::object type = py::module_::import("horovodish.errors").attr(class_name);
  PyErr_SetString(type.ptr(), message);
}

py::object error_tuple(const Error* error) {
  if (error == nullptr) return py::none();
  return py::make_tuple(class_name(error->kind), error->message);
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, 1e6) * 1e9));
}

template <class Names>
py::dict numbered(const Names& names) {
  py::dict result;
  for (size_t i = 0; i < names.size(); ++i) result[py::str(names[i].data(), names[i].size())] = i;
  return result;
}

// A handle together with its engine, which a wait drives. The engine outlives the handles that Python holds.
struct PyHandle {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Handle> handle;
  std::optional<uintptr_t> stream;  // on which a device's memory was handed over
};

// Keeps the memory of an output alive for as long as Python views it.
struct PyOutput {
  std::shared_ptr<Handle> handle;
  size_t index;
};

// Python's lock is given up for a call of the engine.
class WithoutGil {
 public:
  explicit WithoutGil(const Engine& engine) : engine_(engine), state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    engine_.begin_return();
    PyEval_RestoreThread(state_);
    engine_.end_return();
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  const Engine& engine_;
  PyThreadState* const state_;
};

// For a call that keeps the lock: a thread that finds the engine stopped because the process ends waits for the end.
template <class Call>
void quietly_at_exit(const Engine& engine, const Call& call) {
  try {
    call();
  } catch (const EngineStopped&) {
    const WithoutGil without_gil(engine);
    throw;
  }
}

using PyFamily = std::tuple<std::string, size_t, int64_t, int64_t>;  // name, members, structure, run
using PyTensor = std::tuple<uintptr_t, uintptr_t, int, std::vector<int64_t>>;

PyHandle enqueue(const std::shared_ptr<Engine>& engine, int kind, const std::string& name, int op, double prescale,
                 double postscale, int root, const std::vector<PyTensor>& tensors, int device, bool waits,
                 int process_set, const std::vector<int64_t>& splits, const std::vector<std::string>& member_names,
                 std::optional<uintptr_t> stream, const std::optional<PyFamily>& family, py::dict kept,
                 const py::object& keep_alive) {
  auto request = std::make_shared<Request>();
  request->kind = static_cast<Kind>(kind);
  request->name = name;
  request->op = static_cast<ReduceOp>(op);
  request->prescale = prescale;
  request->postscale = postscale;
  request->root = root;
  request->device = device;
  if (family) {
    const auto& [its_name, its_members, structure, run] = *family;
    request->family = {its_name, its_members, structure, run};
  }
  std::vector<Buffer> buffers;
  const bool any_rows = request->kind == Kind::allgather || request->kind == Kind::alltoall;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [source, target, dtype, shape] = tensors[i];
    const std::string numbered = tensors.size() == 1 ? name : name + "[" + std::to_string(i) + "]";
    Member member{member_names.empty() ? numbered : member_names.at(i), static_cast<DType>(dtype), shape};
    Buffer buffer{reinterpret_cast<const std::byte*>(source), reinterpret_cast<std::byte*>(target), 0, splits};
    if (any_rows) {
      buffer.first_dim = member.shape.at(0);
      member.shape[0] = Member::kAnyLength;
    }
    request->members.push_back(std::move(member));
    buffers.push_back(std::move(buffer));
  }
  auto operation = engine->make_operation(std::move(request), std::move(buffers), process_set);
  operation->reported = true;
  if (stream) operation->ready.push_back(Device::get(device).record(*stream));
  const auto handle = operation->handle;
  // Before anything is handed over: a signal of Python's may arrive as soon as this function returns.
  const py::int_ id(handle->id());
  kept[id] = keep_alive;
  try {
    const WithoutGil without_gil(*engine);
    engine->enqueue(std::move(operation), waits);
  } catch (...) {
    kept.attr("pop")(id);
    throw;
  }
  return {engine, handle, stream};
}

// Makes a stream wait for the result. The one on which the memory was handed over waits, too: a framework's allocator may
// give that memory away in the order of that stream.
void order_after(const PyHandle& self, uintptr_t stream) {
  DeviceEvent* const event = self.handle->event();
  if (event == nullptr) return;
  event->order_after(stream);
  if (self.stream && *self.stream != stream) event->order_after(*self.stream);
}

std::shared_ptr<Engine> make_engine(int rank, int size, size_t local_rank, size_t local_size,
                                    const std::vector<int>& arena_descriptors, std::vector<int> peer_sockets,
                                    size_t chunk_bytes, size_t ring_segment_bytes, size_t cache_capacity,
                                    int64_t spin_us, double stall_warning_seconds, double stall_shutdown_seconds,
                                    int stack_signal, std::string plane, bool shared_gpu, bool horovods_gradients) {
  EngineConfig config;
  config.rank = rank;
  config.size = size;
  config.local_rank = local_rank;
  config.local_size = local_size;
  const size_t bytes = EngineConfig::arena_layout(arena_descriptors.size(), chunk_bytes).bytes();
  for (const int descriptor : arena_descriptors) config.arena_memory.push_back(map_memory(descriptor, bytes));
  config.peer_sockets = std::move(peer_sockets);
  config.options = {chunk_bytes,
                    ring_segment_bytes,
                    cache_capacity,
                    std::chrono::microseconds(spin_us),
                    {StallInspector::Seconds(stall_warning_seconds), StallInspector::Seconds(stall_shutdown_seconds)},
                    std::move(plane),
                    shared_gpu,
                    stack_signal,
                    horovods_gradients};
  // Its threads and its shared memory are not in a forked child, where it is left to the process's end.
  const std::shared_ptr<Engine> engine(new Engine(std::move(config)), [process = getpid()](Engine* engine) {
    if (getpid() == process) delete engine;
  });
  set_running_engine(engine);
  return engine;
}

void start_timeline(Engine& engine, int descriptor, const std::string& name, int64_t origin, bool mark_cycles) {
  engine.start_timeline({descriptor, engine.rank(), name, origin, mark_cycles});
}

void add_process_set(Engine& engine, int id, std::vector<int> ranks, std::vector<std::vector<int>> hosts,
                     std::vector<size_t> local, size_t region, const std::optional<py::dict>& mpi, int generation) {
  ProcessSetConfig config;
  config.own = static_cast<int>(std::find(ranks.begin(), ranks.end(), engine.rank()) - ranks.begin());
  config.ranks = std::move(ranks);
  config.hosts = std::move(hosts);
  config.local = std::move(local);
  config.region = region;
  config.generation = generation;
  if (mpi) {
    abi::Mpi table;
    table.library = (*mpi)["library"].cast<std::string>();
    table.communicator = (*mpi)["comm"].cast<uintptr_t>();
    table.byte_type = (*mpi)["byte"].cast<uintptr_t>();
    table.request_bytes = (*mpi)["request_bytes"].cast<size_t>();
    table.status_bytes = (*mpi)["status_bytes"].cast<size_t>();
    table.world_ranks = config.ranks;
    config.mpi = std::move(table);
  }
  py::gil_scoped_release release;
  engine.add_process_set(id, std::move(config));
}

using LatenessTable = std::map<int, std::tuple<uint64_t, double, double>>;

LatenessTable lateness_table(const std::map<int, Lateness>& by_rank) {
  LatenessTable table;
  for (const auto& [rank, its] : by_rank) table[rank] = {its.times_last, its.total_seconds, its.longest_seconds};
  return table;
}

LatenessTable lateness_of(Engine& engine, int process_set) {
  py::gil_scoped_release release;
  return lateness_table(engine.lateness(process_set));
}

// The negotiation without the engine, for tests that play the network themselves.
void bind_negotiation(py::module_& module) {
  py::class_<Negotiation>(module, "Negotiation")
      .def(py::init([](bool root, const std::vector<std::vector<int>>& participants, size_t cache_capacity) {
             std::vector<RankSet> sets;
             for (const auto& ranks : participants) {
               RankSet set;
               for (const int rank : ranks) set.add(RankSet(rank));
               sets.push_back(std::move(set));
             }
             return std::make_unique<Negotiation>(root, std::move(sets), cache_capacity);
           }),
           py::arg("root"), py::arg("participants"), py::arg("cache_capacity"))
      .def(
          "submit",
          [](Negotiation& self, const std::string& name, const std::vector<int64_t>& shape,
             const std::vector<size_t>& absent, size_t members, std::optional<int> broadcast_from,
             const std::string& family, const std::string& refusal) {
            Request request;
            request.name = name;
            if (broadcast_from) {
              request.kind = Kind::broadcast;
              request.root = *broadcast_from;
            }
            request.members.assign(members, {name, DType::float32, shape});
            request.family.name = family;
            request.refusal = refusal;
            self.submit(name, request.signature(), make_mask(absent, members));
          },
          py::arg("name"), py::arg("shape"), py::arg("absent") = std::vector<size_t>{}, py::arg("members") = 1,
          py::arg("broadcast_from") = std::nullopt, py::arg("family") = "", py::arg("refusal") = "")
      .def("flush", &Negotiation::flush)
      .def("join", &Negotiation::join)
      .def(
          "lost",
          [](Negotiation& self, bool failed, uint64_t finished, const std::string& text) {
            self.lost({failed ? Loss::failed : Loss::left, finished, text});
          },
          py::arg("failed"), py::arg("finished"), py::arg("text"))
      .def(
          "parent_lost", [](Negotiation& self, const std::string& text) { self.parent_lost({Loss::failed, 0, text}); },
          py::arg("text"))
      .def("ask", &Negotiation::ask)
      .def("ask_turn", &Negotiation::ask_turn, py::arg("process_set"), py::arg("decision"))
      .def("tell", &Negotiation::tell, py::arg("rank"), py::arg("text"))
      .def("set_now", &Negotiation::set_now, py::arg("seconds"))
      .def("lateness", [](const Negotiation& self) { return lateness_table(self.lateness()); })
      .def("from_child", [](Negotiation& self, size_t child,
                            const py::bytes& message) { self.from_child(child, std::string(message)); })
      .def("from_parent", [](Negotiation& self, const py::bytes& message) { self.from_parent(std::string(message)); })
      .def("take_for_parent", [](Negotiation& self) { return py::bytes(self.take_for_parent()); })
      .def("take_for_children", [](Negotiation& self) { return py::bytes(self.take_for_children()); })
      .def("take_decisions",
           [](Negotiation& self) {
             static constexpr const char* kTypes[] = {"execute", "fail",  "join_done", "lost",
                                                      "stuck",   "asked", "told",      "turn"};
             py::list result;
             while (const auto taken = self.take_decision()) {
               const Decision& decision = *taken;
               std::vector<size_t> absent;
               for (size_t bit = 0; bit < decision.absent.size() * 8; ++bit) {
                 if (mask_bit(decision.absent, bit)) absent.push_back(bit);
               }
               py::dict entry;
               entry["type"] = kTypes[static_cast<size_t>(decision.type)];
               entry["name"] = decision.name;
               entry["text"] = decision.text;
               entry["number"] = decision.number;
               entry["joined"] = decision.joined_ranks;
               entry["rank"] = decision.rank;
               entry["absent"] = absent;
               entry["submitted"] = decision.submitted;
               entry["families"] = decision.families;
               result.append(entry);
             }
             return result;
           })
      .def("cached", &Negotiation::cached)
      .def("unheard", &Negotiation::unheard)
      .def("anything_pending", &Negotiation::anything_pending)
      .def("full_requests", &Negotiation::full_requests);
}

// An operation table without a process set: keeps what it asks its owner for.
class TableAlone final : private OperationTable::Owner {
 public:
  void submit(const std::string& name, const std::string& family, int64_t run, const std::string& refusal) {
    auto request = std::make_shared<Request>();
    request->name = name;
    request->family = {.name = family, .run = run};
    request->refusal = refusal;
    auto operation = std::make_shared<Operation>();
    operation->request = std::move(request);
    operation->handle = std::make_shared<Handle>(++submitted_);
    table_.submit(operation);
  }
  void begin(const std::string& name, uint64_t decision) {
    table_.begin(name, decision);
    table_.submit_next(name);
  }
  void fail(const std::string& name, const std::vector<std::string>& families) { table_.fail(name, "why", families); }
  void end(uint64_t decision) { table_.end(OperationTable::Pointer(table_.executing().at(decision)), nullptr); }
  void abandon() {
    const Error error{ErrorKind::rank_lost, "lost"};
    table_.abandon_undecided(error);
    table_.abandon_executing(error);
  }
  bool busy() const { return table_.busy(); }
  // What has happened since the last call: the name of what was stated, or how the submission with this number ended.
  py::list take_news() { return std::exchange(news_, py::list()); }

 private:
  void state(const std::shared_ptr<Operation>& operation) override {
    news_.append(py::make_tuple("stated", operation->request->name));
  }
  void settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept override {
    news_.append(py::make_tuple(error == nullptr ? "done" : class_name(error->kind), operation->handle->id()));
  }
  void submit_again(const std::shared_ptr<Operation>& operation) noexcept override { table_.submit(operation); }

  uint64_t submitted_ = 0;
  py::list news_;
  OperationTable table_{0, 0, *this};
};

void bind_operation_table(py::module_& module) {
  py::class_<TableAlone>(module, "OperationTable")
      .def(py::init())
      .def("submit", &TableAlone::submit, py::arg("name"), py::arg("family") = "", py::arg("run") = 0,
           py::arg("refusal") = "")
      .def("begin", &TableAlone::begin, py::arg("name"), py::arg("decision"))
      .def("fail", &TableAlone::fail, py::arg("name"), py::arg("families") = std::vector<std::string>{})
      .def("end", &TableAlone::end, py::arg("decision"))
      .def("abandon", &TableAlone::abandon)
      .def("busy", &TableAlone::busy)
      .def("take_news", &TableAlone::take_news);
}

void bind_tree(py::module_& module) {
  module.def(
      "tree_node",
      [](const HostIndices& hosts, int index) {
        const TreeNode node = tree_node(hosts, index);
        return py::make_tuple(node.parent, node.children);
      },
      py::arg("hosts"), py::arg("index"));
  module.def("subtree", &subtree, py::arg("hosts"), py::arg("index"));
  module.attr("TREE_ARITY") = kTreeArity;
}

// The timeline without its thread.
void bind_timeline(py::module_& module) {
  using Ring = SingleProducerRing<int>;
  using What = TimelineRecord::What;
  py::class_<Ring>(module, "Ring")
      .def(py::init<size_t>(), py::arg("capacity"))
      .def(
          "push", [](Ring& self, int value) { return self.push(std::move(value)); }, py::arg("value"))
      .def("take", &Ring::take);
  // Records: what happened (a value of TimelineRecord::What), on which track, from when to when, and the name of what is
  // described before.
  using Records = std::vector<std::tuple<int, uint32_t, int64_t, int64_t, std::string>>;
  module.def(
      "write_timeline",
      [](int descriptor, const Records& records, uint64_t dropped) {
        TraceFile file(descriptor, 0, 0);
        TimelineWriter writer(file);
        int64_t end = 0;
        for (const auto& [what, track, from, to, name] : records) {
          if (!name.empty()) {
            auto request = std::make_shared<Request>();
            request->name = name;
            request->members = {{name, DType::float32, {3}}};
            writer.describe(track, {name, request});
          }
          const bool phase = what == static_cast<int>(What::phase);
          writer.take(phase ? TimelineRecord(Phase::pack, track, from, to)
                            : TimelineRecord(static_cast<What>(what), track, from));
          end = to;
        }
        writer.dropped(dropped, end);
        writer.end_all(end);
        file.finish();
      },
      py::arg("descriptor"), py::arg("records"), py::arg("dropped"));
}

void bind_schedules(py::module_& module) {
  const auto as_dict = [](const Schedule& schedule) {
    static constexpr const char* kThen[] = {"store", "reduce", "reduce_finish"};
    py::list sends, receives;
    for (const Send& send : schedule.sends) sends.append(py::make_tuple(send.peer, send.begin, send.count, send.after));
    for (const Receive& receive : schedule.receives) {
      receives.append(py::make_tuple(receive.peer, receive.begin, receive.count, receive.after,
                                     kThen[static_cast<size_t>(receive.then)]));
    }
    return py::make_tuple(sends, receives);
  };
  module.def("ring_reduce_scatter", [as_dict](int rank, int ranks, const std::vector<size_t>& begins, size_t segment) {
    return as_dict(ring_reduce_scatter(rank, ranks, begins, segment));
  });
  module.def("direct_exchange",
             [as_dict](int rank, int ranks, const std::vector<size_t>& sent, const std::vector<size_t>& received,
                       size_t segment) { return as_dict(direct_exchange(rank, ranks, sent, received, segment)); });
  module.def("ring_allreduce", [as_dict](int rank, int ranks, size_t count, size_t segment) {
    return as_dict(ring_allreduce(rank, ranks, count, segment));
  });
  module.def("direct_allgather", [as_dict](int rank, int ranks, const std::vector<size_t>& begins, size_t segment) {
    return as_dict(direct_allgather(rank, ranks, begins, segment));
  });
  module.def("tree_broadcast", [as_dict](int rank, int ranks, int root, size_t count, size_t segment) {
    return as_dict(tree_broadcast(rank, ranks, root, count, segment));
  });
  module.def("exchanged_chunk", &exchanged_chunk);
  module.def("exchange_tags", [](const std::vector<std::vector<int>>& hosts, uint64_t chunk, int generation) {
    const HostShards shards(hosts, MpiTags::kExchanges);
    std::vector<int> tags;
    for (size_t i = 0; i < shards.count(); ++i) tags.push_back(MpiTags(generation).exchange(chunk, shards.tag(i)));
    return tags;
  });
}

// Where the memory of a contiguous array begins. NumPy's own attributes for that take four times as long.
uintptr_t address_of(const py::object& array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  const auto address = reinterpret_cast<uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.attr("DTYPES") = numbered(kDTypeNames);
  module.attr("REDUCE_OPS") = numbered(kReduceOpNames);
  module.attr("KINDS") = numbered(kKindNames);
  module.attr("REGIONS") = EngineConfig::kRegions;
  module.attr("GENERATIONS") = MpiTags::kGenerations;
  module.def("address", &address_of, py::arg("array"));
  module.def("arena_bytes", [](size_t local_ranks, size_t chunk_bytes) {
    return EngineConfig::arena_layout(local_ranks, chunk_bytes).bytes();
  });

  module.def("c_interface", [] { return reinterpret_cast<uintptr_t>(&c_interface::table()); });
  module.def("load_device_libraries", &load_device_libraries, py::arg("cuda"), py::arg("nccl"),
             py::call_guard<py::gil_scoped_release>());
  module.def("open_device", [](int ordinal) { static_cast<void>(Device::get(ordinal)); }, py::arg("ordinal"));
  module.def(
      "problem_for_nccl",
      [](int kind, int op, const std::vector<int>& dtypes, double prescale, double postscale) {
        std::vector<DType> given;
        for (const int dtype : dtypes) given.push_back(static_cast<DType>(dtype));
        return problem_for_nccl(static_cast<Kind>(kind), static_cast<ReduceOp>(op), given, prescale, postscale);
      },
      py::arg("kind"), py::arg("op"), py::arg("dtypes"), py::arg("prescale"), py::arg("postscale"));

  module.def("finalize_mpi_at_exit", &finalize_mpi_at_exit, py::arg("library"), py::arg("tolerant_world"),
             py::arg("rank"), py::arg("warning_seconds"));
  module.def("do_not_finalize_mpi", &do_not_finalize_mpi);

  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const DuplicateName& error) {
      raise("DuplicateNameError", error.what());
    } catch (const EngineStopped& error) {
      raise("EngineStoppedError", error.what());
    } catch (const ForkedProcess& error) {
      raise("ForkedProcessError", error.what());
    } catch (const std::logic_error& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });

  py::class_<PyOutput>(module, "Output", py::buffer_protocol()).def_buffer([](PyOutput& self) {
    const Handle::Output& output = self.handle->outputs.at(self.index);
    return py::buffer_info(output.data.get(), 1, py::format_descriptor<uint8_t>::format(),
                           static_cast<py::ssize_t>(output.bytes));
  });

  py::class_<PyHandle>(module, "Handle")
      .def_property_readonly("id", [](const PyHandle& self) { return self.handle->id(); })
      .def("poll", [](const PyHandle& self) { return self.handle->settled(); })
      .def(
          "wait",
          [](const PyHandle& self, double seconds) {
            const WithoutGil without_gil(*self.engine);
            return self.engine->wait(*self.handle, nanoseconds(seconds));
          },
          py::arg("seconds"))
      .def("error", [](const PyHandle& self) { return error_tuple(self.handle->error()); })
      .def("memory_abandoned", [](const PyHandle& self) { return self.handle->memory_abandoned(); })
      .def("output",
           [](const PyHandle& self, size_t index) {
             if (index >= self.handle->outputs.size()) throw py::index_error("no such output");
             return py::memoryview(py::cast(PyOutput{self.handle, index}));
           })
      .def("order_after", &order_after, py::arg("stream"))
      .def(
          "move_output",
          [](const PyHandle& self, size_t index, uintptr_t target, uintptr_t stream) {
            const auto& memory = self.handle->outputs.at(index).on_device;
            if (!memory) throw py::value_error("this output is in host memory");
            memory->move_to(reinterpret_cast<std::byte*>(target), stream);
          },
          py::arg("index"), py::arg("target"), py::arg("stream"))
      .def("rows", [](const PyHandle& self, size_t index) { return self.handle->outputs.at(index).rows; })
      .def("last_joined", [](const PyHandle& self) { return self.handle->last_joined; });

  py::class_<BucketPlan>(module, "BucketPlan")
      .def(
          "submit",
          [](BucketPlan& self, size_t index, uintptr_t source, uintptr_t target, uintptr_t stream) {
            quietly_at_exit(self.engine(), [&] {
              self.submit(index, reinterpret_cast<const void*>(source), reinterpret_cast<void*>(target), stream);
            });
          },
          py::arg("index"), py::arg("source"), py::arg("target"), py::arg("stream") = 0)
      .def(
          "absent",
          [](BucketPlan& self, size_t index, uintptr_t target, uintptr_t stream) {
            quietly_at_exit(self.engine(), [&] { self.absent(index, reinterpret_cast<void*>(target), stream); });
          },
          py::arg("index"), py::arg("target"), py::arg("stream") = 0)
      .def("order_after", &BucketPlan::order_after, py::arg("stream"))
      .def("flush", &BucketPlan::flush)
      .def(
          "wait",
          [](BucketPlan& self, double seconds) {
            const WithoutGil without_gil(self.engine());
            return self.wait(nanoseconds(seconds));
          },
          py::arg("seconds"))
      .def("poll", &BucketPlan::settled)
      .def("error", [](const BucketPlan& self) { return error_tuple(self.error()); })
      .def("memory_abandoned", &BucketPlan::memory_abandoned)
      .def("absent_everywhere", &BucketPlan::absent_everywhere)
      .def("any_joined", &BucketPlan::any_joined)
      .def("reset", &BucketPlan::reset);

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("local_rank"),
           py::arg("local_size"), py::arg("arena_descriptors"), py::arg("peer_sockets"), py::arg("chunk_bytes"),
           py::arg("ring_segment_bytes"), py::arg("cache_capacity"), py::arg("spin_us"),
           py::arg("stall_warning_seconds"), py::arg("stall_shutdown_seconds"), py::arg("stack_signal"),
           py::arg("plane"), py::arg("shared_gpu"), py::arg("horovods_gradients"))
      .def_property_readonly("horovods_gradients", &Engine::horovods_gradients)
      .def("add_process_set", &add_process_set, py::arg("id"), py::kw_only(), py::arg("ranks"), py::arg("hosts"),
           py::arg("local"), py::arg("region"), py::arg("mpi"), py::arg("generation"))
      .def("remove_process_set", &Engine::remove_process_set, py::arg("id"), py::call_guard<py::gil_scoped_release>())
      .def("process_set_busy", &Engine::process_set_busy, py::arg("id"), py::call_guard<py::gil_scoped_release>())
      .def("clear_region", &Engine::clear_region, py::arg("region"))
      .def("enqueue", &enqueue, py::arg("kind"), py::arg("name"), py::arg("op"), py::arg("prescale"),
           py::arg("postscale"), py::arg("root"), py::arg("tensors"), py::arg("device"), py::arg("waits"),
           py::arg("process_set"), py::arg("splits"), py::arg("member_names"), py::arg("stream"), py::arg("family"),
           py::arg("kept"), py::arg("keep_alive"))
      .def(
          "refuse",
          [](Engine& self, int kind, const std::string& name, int process_set, const std::string& why) {
            self.refuse(static_cast<Kind>(kind), name, process_set, why);
          },
          py::arg("kind"), py::arg("name"), py::arg("process_set"), py::arg("why"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "plan",
          [](Engine& self, const std::string& name, int op, double prescale, double postscale,
             const std::vector<std::tuple<std::string, int, std::vector<int64_t>, size_t>>& members,
             const std::vector<int>& devices, int process_set, size_t chunk_bytes, size_t segment_bytes) {
            Request shared;
            shared.name = name;
            shared.op = static_cast<ReduceOp>(op);
            shared.prescale = prescale;
            shared.postscale = postscale;
            shared.chunk_bytes = chunk_bytes;
            shared.segment_bytes = segment_bytes;
            std::vector<BucketPlan::PlannedMember> planned;
            for (const auto& [member_name, dtype, shape, bucket] : members) {
              planned.push_back({{member_name, static_cast<DType>(dtype), shape}, bucket});
            }
            return std::make_unique<BucketPlan>(self, shared, planned, devices, process_set);
          },
          py::arg("name"), py::arg("op"), py::arg("prescale"), py::arg("postscale"), py::arg("members"),
          py::arg("devices"), py::arg("process_set") = 0, py::arg("chunk_bytes") = 0, py::arg("segment_bytes") = 0,
          py::keep_alive<0, 1>())
      .def("lateness", &lateness_of, py::arg("process_set"))
      .def("full_requests", &Engine::full_requests, py::arg("process_set"), py::call_guard<py::gil_scoped_release>())
      .def("start_timeline", &start_timeline, py::arg("descriptor"), py::kw_only(), py::arg("name"), py::arg("origin"),
           py::arg("mark_cycles"), py::call_guard<py::gil_scoped_release>())
      .def("stop_timeline", &Engine::stop_timeline, py::call_guard<py::gil_scoped_release>())
      .def("take_settled", &Engine::take_settled)
      .def("hold_other_threads", &Engine::hold_other_threads, py::call_guard<py::gil_scoped_release>())
      .def("loss", &Engine::loss)
      .def("stop", &Engine::stop, py::arg("failed"), py::arg("reason"), py::call_guard<py::gil_scoped_release>());

  // As JAX registers them.
  module.def(
      "xla_handlers",
      [](const std::string& platform) {
        py::dict capsules;
        for (const auto& [name, handler] : xla_handlers(platform)) {
          capsules[name] = py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
        }
        return capsules;
      },
      py::arg("platform"));
  module.def(
      "register_xla_handlers",
      [](uintptr_t api, const std::string& platform) {
        register_xla_handlers(*reinterpret_cast<const abi::xla::Api*>(api), platform);
      },
      py::arg("api"), py::arg("platform"));

  py::module_ testing = module.def_submodule("testing", "Parts of the engine without I/O, for its tests.");
  bind_negotiation(testing);
  bind_operation_table(testing);
  bind_tree(testing);
  bind_timeline(testing);
  bind_schedules(testing);
  testing.def("lines", &lines);
}

}  // namespace horovodish
