// The end of a script by SystemExit. Python tells it to no hook, and has freed the exception when it calls what atexit
// knows.
#include <nanobind/nanobind.h>

#include "python/bindings.h"

namespace nb = nanobind;

namespace horovodish {

namespace {

destructor free_exit = nullptr;  // Python's own, once on_exit() was called
nb::handle told;  // never released: Python may be gone when this library is
unsigned long main_thread = 0;

// An exception that nobody has caught is freed when no frame is left on its thread.
void free_and_tell(PyObject* self) {
  if (PyThread_get_thread_ident() == main_thread && PyEval_GetFrame() == nullptr) {
    const auto or_none = [](PyObject* object) { return nb::borrow(object != nullptr ? object : Py_None); };
    try {
      told(or_none(reinterpret_cast<PySystemExitObject*>(self)->code),
           or_none(reinterpret_cast<PyBaseExceptionObject*>(self)->traceback));
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("the end of the script");
    }
  }
  free_exit(self);
}

}  // namespace

void bind_exits(nb::module_& module) {
  // Calls a function with the code and the traceback of a SystemExit that ends the script of a thread. The last
  // function counts.
  module.def(
      "on_exit",
      [](const nb::object& function, unsigned long thread) {
        told = function.inc_ref();
        main_thread = thread;
        auto* const type = reinterpret_cast<PyTypeObject*>(PyExc_SystemExit);
        if (type->tp_dealloc == free_and_tell) return;
        free_exit = type->tp_dealloc;
        type->tp_dealloc = free_and_tell;
      },
      nb::arg("function"), nb::arg("thread"));
}

}  // namespace horovodish
