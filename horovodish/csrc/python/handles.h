// What Python holds of an operation, and what a call from Python into the engine needs.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <memory>

#include "engine/engine.h"

namespace horovodish {

// The owner of memory, from Python. Only a thread that holds Python's lock can release it, and no thread of the engine
// takes that lock. So the last thread that needs the memory puts the owner in a list, and a later call from Python
// releases it.
struct Owner {
  PyObject* object;
  Owner* next;
};

std::shared_ptr<Owner> owned(nanobind::object object);
// Releases the owners in the list. This may run code of the user, which may submit an operation.
void release_owners();

// Releases Python's lock during a call of the engine.
class WithoutGil {
 public:
  explicit WithoutGil(const Engine& engine) : engine_(engine), state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    engine_.enter_python();
    PyEval_RestoreThread(state_);
    engine_.entered_python();
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  const Engine& engine_;
  PyThreadState* const state_;
};

nanobind::object error_tuple(const Error* error);
std::chrono::nanoseconds nanoseconds(double seconds);

// Adds the classes of handles and their outputs, and the method of the engine that makes handles.
void bind_handles(nanobind::module_& module, nanobind::class_<Engine>& engine);

}  // namespace horovodish
