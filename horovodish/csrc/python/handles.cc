#include "python/handles.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "python/bindings.h"

namespace nb = nanobind;

namespace horovodish {

namespace {

// No mutex guards the list: a thread might hold the mutex while another one forks.
std::atomic<Owner*> unused_owners{nullptr};

// A handle together with its engine, because a wait drives the engine. The engine outlives the handles that Python
// holds.
struct PyHandle {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<const Request> request;
  std::shared_ptr<const std::string> signature;  // of the request
  int process_set;
  std::shared_ptr<Handle> handle;
  std::optional<uintptr_t> stream;  // the stream on which a device's memory was handed over
  std::shared_ptr<Owner> memory;  // null after release()
  std::shared_ptr<DeviceEvent> finished = {};  // the caller's result has been made of what the operation gave
};

// Keeps the memory of an output alive for as long as Python views it.
struct PyOutput {
  std::shared_ptr<Handle> handle;
  size_t index;
};

PyHandle submitted(const std::shared_ptr<Engine>& engine, std::shared_ptr<Operation> operation,
                   std::optional<uintptr_t> stream, bool waits, nb::object owner) {
  const auto memory = owned(std::move(owner));
  operation->memory = memory;
  if (stream) operation->ready.push_back(Device::get(operation->request->device).record(*stream));
  PyHandle submitted{
      engine, operation->request, operation->signature, operation->process_set, operation->handle, stream, memory};
  const WithoutGil without_gil(*engine);
  engine->enqueue(std::move(operation), waits);
  return submitted;
}

// `tensors`: source, target, dtype and shape of each. `family`: its name, members, structure and run.
PyHandle enqueue(const std::shared_ptr<Engine>& engine, int kind, const std::string& name, int op, double prescale,
                 double postscale, int root,
                 const std::vector<std::tuple<uintptr_t, uintptr_t, int, std::vector<int64_t>>>& tensors, int device,
                 bool waits, int process_set, const std::vector<int64_t>& splits,
                 const std::vector<std::string>& member_names, std::optional<uintptr_t> stream,
                 const std::optional<std::tuple<std::string, size_t, int64_t, int64_t>>& family, bool by_elements,
                 const std::vector<int64_t>& ends, uint32_t tag, const std::string& codec, const std::string& function,
                 nb::object owner) {
  release_owners();
  auto request = std::make_shared<Request>();
  request->kind = static_cast<Kind>(kind);
  request->name = name;
  request->function = function;
  request->op = static_cast<ReduceOp>(op);
  request->prescale = prescale;
  request->postscale = postscale;
  request->root = WorldRank(root);
  request->by_elements = by_elements;
  request->ends = ends;
  request->tag = tag;
  request->compression = compression_of(codec);
  request->device = device;
  if (family) {
    const auto& [its_name, its_members, structure, run] = *family;
    request->family = {its_name, its_members, structure, run};
  }
  std::vector<Buffer> buffers;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [source, target, dtype, shape] = tensors[i];
    const std::string its_name = member_names.empty() ? member_name(name, i, tensors.size()) : member_names.at(i);
    add_member(*request, buffers, member_of(its_name, static_cast<DType>(dtype), shape),
               {reinterpret_cast<const std::byte*>(source), reinterpret_cast<std::byte*>(target), splits});
  }
  return submitted(engine, operation_of(std::move(request), std::move(buffers), process_set, engine->make_handle()),
                   stream, waits, std::move(owner));
}

// Submits the operation of `self` once more, with other memory and perhaps another name. The operation has one tensor,
// in host memory, and the engine does not allocate its result. The caller is about to wait.
PyHandle again(const PyHandle& self, const std::string& name, uintptr_t source, uintptr_t target, nb::object owner) {
  release_owners();
  auto request = self.request;
  auto signature = self.signature;
  if (request->name != name) {
    auto renamed = std::make_shared<Request>(*request);
    renamed->name = renamed->members.at(0).name = name;
    request = std::move(renamed);
    signature = nullptr;
  }
  std::vector<Buffer> buffers(1);
  buffers[0].source = reinterpret_cast<const std::byte*>(source);
  buffers[0].target = reinterpret_cast<std::byte*>(target);
  return submitted(self.engine,
                   operation_of(std::move(request), std::move(buffers), self.process_set, self.engine->make_handle(),
                                std::move(signature)),
                   std::nullopt, true, std::move(owner));
}

// Makes a stream wait for the result, also for what another stream still does to it. The stream on which the memory was
// handed over waits, too: a framework's allocator may reuse the memory in the order of that stream.
void order_after(const PyHandle& self, uintptr_t stream) {
  DeviceEvent* const event = self.handle->event();
  if (event == nullptr) return;
  event->order_after(stream);
  if (self.stream && *self.stream != stream) event->order_after(*self.stream);
  if (self.finished) self.finished->order_after(stream);
}

// Python's buffer protocol.
int view_output(PyObject* self, Py_buffer* view, int flags) {
  const auto& [handle, index] = *nb::inst_ptr<PyOutput>(self);
  const Handle::Output& output = handle->outputs.at(index);
  return PyBuffer_FillInfo(view, self, output.data.get(), static_cast<Py_ssize_t>(output.bytes), 0, flags);
}

}  // namespace

std::shared_ptr<Owner> owned(nb::object object) {
  return {new Owner{object.release().ptr(), nullptr}, [](Owner* owner) {
            owner->next = unused_owners.load(std::memory_order_relaxed);
            while (!unused_owners.compare_exchange_weak(owner->next, owner, std::memory_order_release)) {
            }
          }};
}

void release_owners() {
  for (Owner* owner = unused_owners.exchange(nullptr, std::memory_order_acquire); owner != nullptr;) {
    const std::unique_ptr<Owner> left(owner);
    owner = owner->next;
    Py_XDECREF(left->object);
  }
}

nb::object error_tuple(const Error* error) {
  if (error == nullptr) return nb::none();
  return nb::make_tuple(class_name(error->kind), error->message);
}

std::chrono::nanoseconds nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, 1e6) * 1e9));
}

void bind_handles(nb::module_& module, nb::class_<Engine>& engine) {
  PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&view_output)}, {0, nullptr}};
  nb::class_<PyOutput>(module, "Output", nb::type_slots(slots));

  nb::class_<PyHandle>(module, "Handle")
      .def_prop_ro("id", [](const PyHandle& self) { return self.handle->id(); })
      .def("poll", [](const PyHandle& self) { return self.handle->settled(); })
      .def(
          "wait",
          [](const PyHandle& self, double seconds) {
            const WithoutGil without_gil(*self.engine);
            return self.engine->wait(*self.handle, nanoseconds(seconds));
          },
          nb::arg("seconds"))
      .def("error", [](const PyHandle& self) { return error_tuple(self.handle->error()); })
      .def("release",
           [](PyHandle& self) {
             // The caller's streams wait for the GPU's unfinished work, and a framework reuses memory in the order of
             // these streams.
             if (self.memory && self.handle->error() == nullptr) Py_CLEAR(self.memory->object);
             self.memory.reset();
             release_owners();
           })
      .def("output",
           [](const PyHandle& self, size_t index) {
             if (index >= self.handle->outputs.size()) throw nb::index_error("no such output");
             return nb::steal(PyMemoryView_FromObject(nb::cast(PyOutput{self.handle, index}).ptr()));
           })
      .def("again", &again, nb::arg("name"), nb::arg("source"), nb::arg("target"), nb::arg("owner"))
      .def("order_after", &order_after, nb::arg("stream"))
      .def(
          "finished_on",
          [](PyHandle& self, uintptr_t stream) { self.finished = Device::get(self.request->device).record(stream); },
          nb::arg("stream"))
      .def(
          "move_output",
          [](const PyHandle& self, size_t index, uintptr_t target, uintptr_t stream) {
            const auto& memory = self.handle->outputs.at(index).on_device;
            if (!memory) throw nb::value_error("this output is in host memory");
            memory->move_to(reinterpret_cast<std::byte*>(target), stream);
          },
          nb::arg("index"), nb::arg("target"), nb::arg("stream"))
      .def("rows", [](const PyHandle& self, size_t index) { return self.handle->outputs.at(index).rows; })
      .def("last_joined", [](const PyHandle& self) { return self.handle->last_joined; })
      .def("sender", [](const PyHandle& self) { return self.handle->sender; })
      .def("cancel", [](const PyHandle& self) {
        const WithoutGil without_gil(*self.engine);
        return self.engine->cancel(*self.handle);
      });
  engine.def("enqueue", &enqueue, nb::arg("kind"), nb::arg("name"), nb::arg("op"), nb::arg("prescale"),
             nb::arg("postscale"), nb::arg("root"), nb::arg("tensors"), nb::arg("device"), nb::arg("waits"),
             nb::arg("process_set"), nb::arg("splits"), nb::arg("member_names"), nb::arg("stream"), nb::arg("family"),
             nb::arg("by_elements"), nb::arg("ends"), nb::arg("tag"), nb::arg("codec"), nb::arg("function"),
             nb::arg("owner").none());
}

}  // namespace horovodish
