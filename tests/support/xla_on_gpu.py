"""What XLA does with collectives on a GPU, on pretended ones: the calls of a lowered program, one after the other."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import ml_dtypes
import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir

from horovodish import _native
from support.pretended_gpu import Stream

# XLA's number of a dtype, by MLIR's name.
DTYPES = {
    "i1": (1, np.bool_),
    "i8": (2, np.int8),
    "i16": (3, np.int16),
    "i32": (4, np.int32),
    "i64": (5, np.int64),
    "ui8": (6, np.uint8),
    "f16": (10, np.float16),
    "f32": (11, np.float32),
    "f64": (12, np.float64),
    "bf16": (16, ml_dtypes.bfloat16),
}
SCALAR, STRING, BUFFER = 3, 4, 1


def structure(name: str, *fields: tuple[str, Any]) -> Any:
    """A struct of XLA's interface, which begins with its size and its extensions."""
    common = [("struct_size", c_size_t), ("extensions", c_void_p)]
    return type(name, (ctypes.Structure,), {"_fields_": [*common, *fields]})


Version = structure("Version", ("major", c_int), ("minor", c_int))
ErrorCreate = structure("ErrorCreate", ("message", c_char_p), ("code", c_int))
ContextGet = structure("ContextGet", ("context", c_void_p), ("answer", c_int64))
Buffer = structure("Buffer", ("dtype", c_int), ("data", c_void_p), ("rank", c_int64), ("dims", ctypes.POINTER(c_int64)))
Buffers = structure("Buffers", ("size", c_int64), ("types", ctypes.POINTER(c_int)), ("each", ctypes.POINTER(c_void_p)))
Attributes = structure(
    "Attributes",
    ("size", c_int64),
    ("types", ctypes.POINTER(c_int)),
    ("names", ctypes.POINTER(c_void_p)),
    ("values", ctypes.POINTER(c_void_p)),
)
Api = structure(
    "Api",
    ("version", Version),
    ("internal", c_void_p),
    ("error_create", c_void_p),
    ("unused", c_void_p * 3),
    ("stream_get", c_void_p),
    ("unused_too", c_void_p * 8),
    ("futures", c_void_p * 3),
    ("run_id_get", c_void_p),
    ("device_ordinal_get", c_void_p),
)
Frame = structure(
    "Frame",
    ("api", ctypes.POINTER(Api)),
    ("context", c_void_p),
    ("stage", c_int),
    ("arguments", Buffers),
    ("results", Buffers),
    ("attributes", Attributes),
    ("future", c_void_p),
)


class Span(ctypes.Structure):
    _fields_ = [("data", c_char_p), ("size", c_size_t)]


class Scalar(ctypes.Structure):
    _fields_ = [("dtype", c_int), ("value", c_void_p)]


class XlaError(Exception):
    """What a call of the program failed with: XLA's code, and the text."""


class Gpu:
    """A pretended GPU as XLA uses it.

    Args:
        ordinal: of the device.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.stream = Stream()
        self._run_ids = itertools.count(1)
        self._run_id = 0
        self._error: tuple[int, str] | None = None
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = c_void_p, [ctypes.py_object, c_char_p]
        handler = ctypes.CFUNCTYPE(c_void_p, ctypes.POINTER(Frame))
        self._handlers = {
            name: handler(get(capsule, b"xla._CUSTOM_CALL_TARGET"))
            for name, capsule in _native.xla_handlers("cuda").items()
        }
        self._functions: list[Any] = []
        self._api = Api(ctypes.sizeof(Api))
        self._api.version = Version(ctypes.sizeof(Version), None, 0, 3)
        self._api.error_create = self._function(ErrorCreate, self._create_error)
        self._api.stream_get = self._answer(lambda: self.stream.handle)
        self._api.run_id_get = self._answer(lambda: self._run_id)
        self._api.device_ordinal_get = self._answer(lambda: self.ordinal)

    def run(
        self,
        lowered: Any,
        arrays: Sequence[Any],
        backwards: bool = False,
        between: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """The results of a program of JAX's that consists of collectives; their values come when the stream gets there.

        Args:
            lowered: the program.
            arrays: its arguments.
            backwards: the starts, which depend on nothing else, are run in the opposite order.
            between: called when all starts and no done has been run.

        Raises:
            XlaError: a call has failed; what follows it is not run.
        """
        block = _main(lowered.compiler_ir("stablehlo"))
        return self._run(block.operations, block.arguments, arrays, backwards, between)

    def run_text(self, text: str, arrays: Sequence[Any]) -> list[Any]:
        """As `run`, of a module for TensorFlow, as `horovodish.tensorflow.stablehlo` writes it."""
        with jax_mlir.make_ir_context():
            module = ir.Module.parse(text)  # which owns the rest
            main = _main(module)
            platform, *arguments = main.arguments
            (case,) = (each for each in main.operations if each.operation.name == "stablehlo.case")
            assert list(case.operands) == [platform]
            return self._run(case.regions[1].blocks[0].operations, arguments, arrays)

    def _run(
        self,
        operations: Sequence[Any],
        arguments: Sequence[Any],
        arrays: Sequence[Any],
        backwards: bool = False,
        between: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        run_id = next(self._run_ids)
        values = {argument.get_name(): array for argument, array in zip(arguments, arrays, strict=True)}
        *others, last = operations
        calls = [each for each in others if each.operation.name == "stablehlo.custom_call"]
        starts = [call for call in calls if _target(call) == "horovodish_start"]
        dones = [call for call in calls if _target(call) == "horovodish_done"]
        assert starts + dones == calls
        for stage in starts, dones:
            for call in reversed(stage) if backwards and stage is starts else stage:
                given = [values[operand.get_name()] for operand in _operands(call)]
                made = [np.empty(value.type.shape, DTYPES[str(value.type.element_type)][1]) for value in call.results]
                values.update((value.get_name(), array) for value, array in zip(call.results, made, strict=True))
                self._run_id = run_id
                self._call(call, given, made)
            if stage is starts:
                between()
        return [values[operand.get_name()] for operand in last.operands]

    def _call(self, operation: Any, arguments: list[Any], results: list[Any]) -> None:
        kept: list[Any] = []
        frame = Frame(ctypes.sizeof(Frame))
        frame.api = ctypes.pointer(self._api)
        frame.stage = 3
        frame.arguments, frame.results = _buffers(arguments, kept), _buffers(results, kept)
        config = "mhlo.backend_config" if "mhlo.backend_config" in operation.attributes else "backend_config"
        frame.attributes = _attributes(operation.attributes[config], kept)
        if self._handlers[_target(operation)](ctypes.byref(frame)):
            assert self._error is not None
            raise XlaError(*self._error)

    def _function(self, arguments: Any, body: Callable[[Any], int | None]) -> int:
        function = ctypes.CFUNCTYPE(c_void_p, ctypes.POINTER(arguments))(lambda given: body(given.contents))
        self._functions.append(function)
        return ctypes.cast(function, c_void_p).value or 0

    def _answer(self, value: Callable[[], int]) -> int:
        def set_answer(given: Any) -> None:
            given.answer = value()

        return self._function(ContextGet, set_answer)

    def _create_error(self, given: Any) -> int:
        self._error = given.code, given.message.decode()
        return 1


def _main(module: Any) -> Any:
    """The block of a module's main function."""
    (function,) = (each for each in module.body.operations if str(each.name) == '"main"')
    return function.regions[0].blocks[0]


def _operands(call: Any) -> list[Any]:
    """Without those that are shapes of results, which XLA takes away when it knows them."""
    shapes = call.attributes.get("indices_of_shape_operands", [])
    return [operand for index, operand in enumerate(call.operands) if index not in list(shapes)]


def _target(operation: Any) -> str:
    return str(operation.attributes["call_target_name"].value)


def _array(kind: Any, values: Sequence[Any], kept: list[Any]) -> Any:
    array = (kind * max(len(values), 1))(*values)
    kept.append(array)
    return array


def _address(value: Any, kept: list[Any]) -> int:
    kept.append(value)
    return ctypes.addressof(value)


def _buffers(arrays: Sequence[Any], kept: list[Any]) -> Any:
    codes = {np.dtype(dtype): code for code, dtype in DTYPES.values()}
    made = []
    for array in arrays:
        shape = _array(c_int64, array.shape, kept)
        made.append(
            _address(
                Buffer(ctypes.sizeof(Buffer), None, codes[array.dtype], array.ctypes.data, array.ndim, shape), kept
            )
        )
    types = _array(c_int, [BUFFER] * len(made), kept)
    return Buffers(ctypes.sizeof(Buffers), None, len(made), types, _array(c_void_p, made, kept))


def _attributes(given: Any, kept: list[Any]) -> Any:
    types, names, values = [], [], []
    for named in given:
        name, value = named.name.encode(), named.attr.value
        names.append(_address(Span(name, len(name)), kept))
        if isinstance(value, str):
            text = value.encode()
            types.append(STRING)
            values.append(_address(Span(text, len(text)), kept))
            continue
        number = ctypes.c_double(value) if isinstance(value, float) else c_int64(value)
        code = DTYPES["f64" if isinstance(value, float) else "i64"][0]
        types.append(SCALAR)
        values.append(_address(Scalar(code, _address(number, kept)), kept))
    return Attributes(
        ctypes.sizeof(Attributes),
        None,
        len(names),
        _array(c_int, types, kept),
        _array(c_void_p, names, kept),
        _array(c_void_p, values, kept),
    )
