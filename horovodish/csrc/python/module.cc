// The extension module: its constants, its errors, and what needs no engine.
#include <stdexcept>
#include <string>

#include "abi/mpi.h"
#include "arithmetic/codecs/codec.h"
#include "engine/engine.h"
#include "engine/executions.h"
#include "engine_interface.h"
#include "gpu/device.h"
#include "memory/sleeping_process.h"
#include "negotiation/tree.h"
#include "planes/mpi/mpi_exit.h"
#include "planes/mpi/schedule.h"
#include "planes/nccl/nccl_launch.h"
#include "planes/shards.h"
#include "python/bindings.h"
#include "xla/xla_handlers.h"

namespace nb = nanobind;

namespace horovodish {

namespace {

template <class Names>
nb::dict numbered(const Names& names) {
  nb::dict result;
  for (size_t i = 0; i < names.size(); ++i) result[nb::str(names[i].data(), names[i].size())] = i;
  return result;
}

// The address of a contiguous array's memory. NumPy's own attributes take four times as long.
uintptr_t address_of(const nb::object& array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto address = reinterpret_cast<uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

// `function` is never released, because a thread of a framework may be about to call it.
void compare_by(const nb::object& function) {
  if (function.is_none()) {
    set_comparer(nullptr);
    return;
  }
  const nb::handle called = function.inc_ref();
  set_comparer([called](std::string_view described, const std::vector<uintptr_t>& addresses, uint64_t number) {
    const nb::gil_scoped_acquire gil;
    try {
      called(described, addresses, number);
    } catch (nb::python_error& error) {
      // The program goes on. Ctrl-C is not lost: Python raises it as soon as the thread is back in Python.
      if (error.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();
      } else {
        error.discard_as_unraisable("the comparison of parameters");
      }
    }
  });
}

}  // namespace

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);  // a process may end with operations under way, whose handles stay
  module.attr("DTYPES") = numbered(kDTypeNames);
  module.attr("REDUCE_OPS") = numbered(kReduceOpNames);
  module.attr("KINDS") = numbered(kKindNames);
  module.attr("CODECS") = numbered(kCodecNames);
  module.attr("REGIONS") = EngineConfig::kRegions;
  module.attr("GENERATIONS") = abi::MpiTags::kGenerations;
  module.def("address", &address_of, nb::arg("array"));
  module.def("arena_bytes", [](size_t local_ranks, size_t chunk_bytes) {
    return EngineConfig::arena_layout(local_ranks, chunk_bytes).bytes();
  });

  module.def("compares_at", &compares_at, nb::arg("number"));
  module.attr("TREE_ARITY") = kTreeArity;
  module.def("fastest_allreduce", [](int ranks, size_t bytes) {
    static constexpr const char* kNames[] = {"direct", "two_step", "halving", "ring"};
    return kNames[static_cast<size_t>(fastest_allreduce(ranks, bytes))];
  });
  module.def("exchanged_chunk", &exchanged_chunk, nb::arg("wanted"), nb::arg("segment"), nb::arg("pieces"),
             nb::arg("most"));
  module.def("engine_interface", [] { return reinterpret_cast<uintptr_t>(&engine_interface()); });
  module.def("load_device_libraries", &load_device_libraries, nb::arg("cuda"), nb::arg("nccl"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("open_device", [](int ordinal) { static_cast<void>(Device::get(ordinal)); }, nb::arg("ordinal"));
  module.def(
      "problem_for_nccl",
      [](int kind, int op, const std::vector<int>& dtypes, double prescale, double postscale,
         const std::string& codec) {
        std::vector<DType> given;
        for (const int dtype : dtypes) given.push_back(static_cast<DType>(dtype));
        return problem_for_nccl(static_cast<Kind>(kind), static_cast<ReduceOp>(op), given, prescale, postscale,
                                compression_of(codec).kind);
      },
      nb::arg("kind"), nb::arg("op"), nb::arg("dtypes"), nb::arg("prescale"), nb::arg("postscale"), nb::arg("codec"));

  module.def("record_no_waits", &record_no_waits);
  module.def("add_background_thread", &add_background_thread, nb::arg("thread"));
  module.def("remove_background_thread", &remove_background_thread, nb::arg("thread"));
  module.def("finalize_mpi_at_exit", &finalize_mpi_at_exit, nb::arg("library"), nb::arg("tolerant_world"),
             nb::arg("rank"), nb::arg("warning_seconds"), nb::arg("patience_seconds"));
  module.def("end_without_lost_ranks", [] { end_without_lost_ranks(Loss::failed); });
  module.def("fail_at_exit", &fail_at_exit);

  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const EngineError& error) {
      const nb::object type = nb::module_::import_("horovodish.errors").attr(class_name(error.kind()));
      PyErr_SetString(type.ptr(), error.what());
    } catch (const std::logic_error& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });

  // In the form that JAX registers.
  module.def(
      "xla_handlers",
      [](const std::string& platform) {
        nb::dict capsules;
        for (const auto& [name, handler] : xla_handlers(platform)) {
          capsules[name] = nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
        }
        return capsules;
      },
      nb::arg("platform"));
  module.def(
      "register_xla_handlers",
      [](uintptr_t api, const std::string& platform) {
        register_xla_handlers(*reinterpret_cast<const abi::xla::Api*>(api), platform);
      },
      nb::arg("api"), nb::arg("platform"));
  module.def("compare_by", &compare_by, nb::arg("function").none());
  module.def("executions", &executions);
  module.def("count_at_least", &count_at_least, nb::arg("executions"));

  bind_engine(module);
  bind_exits(module);
  nb::module_ testing = module.def_submodule("testing", "Parts of the engine without I/O, for its tests.");
  bind_testing(testing);
}

}  // namespace horovodish
