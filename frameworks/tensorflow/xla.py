"""The collectives in functions that XLA compiles (`jit_compile=True`).

XLA compiles no kernels of TensorFlow's C interface. But TensorFlow takes modules of StableHLO, and those may call what
is registered with XLA's foreign function interface. So a collective is a module of `stablehlo.py` there, and the
engine's calls for JAX's programs run it. The table of the interface is what a C++ function of TensorFlow's returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from horovodish import _native
from horovodish.collectives import devices
from horovodish.collectives.operation import checked_splits
from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.reduce_ops import ReduceOp, Sum
from horovodish.runtime import basics
from horovodish.tensorflow.sets import set_of
from horovodish.tensorflow.stablehlo import PLATFORMS, Member, Operation, module
from horovodish.tensorflow.tracing import belonging_to_xla, refuse_xla

_LIBRARY, _TABLE = "libtensorflow_cc.so.2", "_ZN3xla3ffi12GetXlaFfiApiEv"  # xla::ffi::GetXlaFfiApi()
_MODULE_VERSION = 9
"""Of `XlaCallModule`; TensorFlow has known it since 2.18."""

derivatives: dict[str, Callable[..., Sequence[Any]]] = {}
"""By collective, what computes the gradients of its tensors from those of its results; `autograd.py` fills it."""


@dataclass
class Call:
    """A collective of a function. It looks like the operation of a graph to what computes its gradient.

    Attributes:
        collective: one of `library.COLLECTIVES`.
        name: what `names.as_input` makes of the operation's name.
        tensors: its members.
        attributes: those of the native operation.
        results: the tensors that come out, once there are any.
    """

    collective: str
    name: str
    tensors: Sequence[Any]
    attributes: dict[str, Any]
    results: Sequence[Any] = ()

    @property
    def inputs(self) -> list[Any]:
        """Those of the native operation."""
        return [self.name, *self.tensors, *(self._rows() if self.collective == "Alltoall" else [])]

    @property
    def outputs(self) -> list[Any]:
        """Those of the native operation. XLA must know numbers of rows, so they are computed in every function anew."""
        return [*self.results, *self._rows()]

    def get_attr(self, name: str) -> Any:
        """An attribute of the native operation."""
        return [tensor.dtype for tensor in self.tensors] if name == "T" else self.attributes[name]

    def operation(self) -> Operation:
        """What is to be done.

        Raises:
            ValueError: a number of dimensions is not known, or the rows of an alltoall cannot be dealt out.
        """
        family, name = self.name.split("\n", 1)
        for tensor in self.tensors:
            if tensor.shape.rank is None:
                raise ValueError(
                    f"{name}: XLA compiles for a known number of dimensions, and that of a tensor is not; set it with "
                    "tf.ensure_shape"
                )
        members = tuple(Member(tuple(tensor.shape), tensor.dtype.name) for tensor in self.tensors)
        if self.collective == "Alltoall" and members[0].shape[0] is not None:
            checked_splits(None, members[0].shape[0], self._process_set.size(), name)
        prescale, postscale = map(float, self.attributes.get("factors", "1.0 1.0").split())
        op, root = ReduceOp(self.attributes.get("op", Sum)), self.attributes.get("root_rank", 0)
        kind = self.collective.lower()
        return Operation(kind, name, family, members, self._process_set, op, prescale, postscale, root)

    def _rows(self) -> list[Any]:
        """For each tensor, how many rows come from each rank, where that is an output of the native operation."""
        if self.collective not in ("Allgather", "Alltoall"):
            return []
        size = self._process_set.size()
        share = size if self.collective == "Alltoall" else 1
        return [tf.fill([size], tf.shape(tensor, tf.int64)[0] // share) for tensor in self.tensors]

    @property
    def _process_set(self) -> ProcessSet:
        return set_of(self.attributes["process_set"])


def call(collective: str, name: str, *inputs: Any, **attributes: Any) -> Any:
    """A collective of the function that is traced; arguments and outputs are those of the native operation.

    An alltoall is one of equally many rows for each rank, whatever its splits.

    Raises:
        NotImplementedError, ValueError: as `run`.
    """
    given = inputs[0] if isinstance(inputs[0], list) else [inputs[0]]
    tensors = [tf.convert_to_tensor(each) for each in given]  # of gradients, which may be slices
    (outputs,) = run([Call(collective, name, tensors, attributes)])
    if collective == "Broadcast":
        return outputs[0]
    if collective == "Alltoall":
        return SimpleNamespace(received=outputs[0], received_splits=outputs[1])
    if collective == "Allgather":
        return SimpleNamespace(gathered=outputs[: len(tensors)], rows=outputs[len(tensors) :])
    return outputs


def run(calls: Sequence[Call]) -> list[list[Any]]:
    """The outputs of several collectives, all of which are under way before one of them is waited for.

    Raises:
        NotImplementedError: this TensorFlow cannot, or NCCL cannot where there are GPUs.
        ValueError: as `Call.operation`.
    """
    operations = [call.operation() for call in calls]
    _prepare(operations)
    text = module(operations, basics.rank())
    results = [result for operation in operations for result in operation.results]

    @tf.custom_gradient
    def differentiable(*tensors: Any) -> Any:
        found = xla.call_module(
            tensors,
            version=_MODULE_VERSION,
            module=text,
            Tout=[result.dtype for result in results],
            Sout=[result.shape for result in results],
            platforms=PLATFORMS,
        )
        return list(found), lambda *gradients: _gradients(calls, gradients)

    found = iter(differentiable(*[tensor for call in calls for tensor in call.tensors]))
    for call in calls:
        call.results = list(itertools.islice(found, len(call.tensors)))
    return [call.outputs for call in calls]


def _gradients(calls: Sequence[Call], gradients: Sequence[Any]) -> list[Any]:
    given = iter(gradients)
    with belonging_to_xla():
        return [
            gradient
            for call in calls
            for gradient in derivatives[call.collective](call, *itertools.islice(given, len(call.tensors)))
        ]


def _prepare(operations: Sequence[Operation]) -> None:
    try:
        _register()
        if not tf.config.list_physical_devices("GPU"):
            return
        for each in operations:
            kind, dtypes = _native.KINDS[each.kind], [_native.DTYPES[member.dtype] for member in each.members]
            why = _native.problem_for_nccl(kind, each.op, dtypes, each.prescale_factor, each.postscale_factor)
            if why := why or devices.problem():
                raise RuntimeError(f"on a GPU: {why}")
    except RuntimeError as error:
        refuse_xla(f"{operations[0].kind} ({error})")


@functools.cache
def _register() -> None:
    try:
        table = ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / _LIBRARY), os.RTLD_NOLOAD | os.RTLD_LAZY)[_TABLE]
    except (OSError, AttributeError):
        raise RuntimeError("it calls nothing of ours before TensorFlow 2.20") from None
    table.restype = ctypes.c_void_p
    for platform in ("cpu", "cuda"):
        _native.register_xla_handlers(table(), platform)


with contextlib.suppress(RuntimeError):  # then it is refused when a function is traced
    _register()  # for functions that come from files, too
