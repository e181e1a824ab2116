"""The collectives in functions that XLA compiles (`jit_compile=True`).

XLA compiles no kernels of TensorFlow's C interface. But TensorFlow takes modules of StableHLO, and these may call
functions registered with XLA's foreign function interface. So a collective is a module of `stablehlo.py` there, and the
engine's calls for JAX's programs run it. A C++ function of TensorFlow's returns the table of the interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from horovodish import _native
from horovodish.collectives import devices
from horovodish.collectives.adapter import checked_splits
from horovodish.collectives.operation import Family
from horovodish.tensorflow.calls import Call
from horovodish.tensorflow.stablehlo import PLATFORMS, Member, Typed, module
from horovodish.tensorflow.tracing import belonging_to_xla, refuse_xla

_LIBRARY, _TABLE = "libtensorflow_cc.so.2", "_ZN3xla3ffi12GetXlaFfiApiEv"  # xla::ffi::GetXlaFfiApi()
_MODULE_VERSION = 9
"""The version of `XlaCallModule` that is used here; TensorFlow has known it since 2.18."""

derivatives: dict[str, Callable[..., Sequence[Any]]] = {}
"""By kind of collective, the function that computes its gradients. `autograd.py` fills it."""


def run(calls: Sequence[Call]) -> list[tuple[list[Any], list[Any]]]:
    """As `library.run`, for several collectives: all begin before the first wait.

    An alltoall sends equally many rows to each rank, whatever its splits.

    Raises:
        NotImplementedError: this TensorFlow cannot, or NCCL cannot where there are GPUs.
        ValueError: a number of dimensions is not known, or the rows of an alltoall cannot be dealt out.
    """
    # Gradients may be slices.
    calls = [call._replace(tensors=[tf.convert_to_tensor(tensor) for tensor in call.tensors]) for call in calls]
    typed = [_typed(call) for call in calls]
    _prepare(typed)
    text = module(typed)
    results = [result for each in typed for result in each.results]
    done: list[Call] = []

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
        return list(found), lambda *gradients: _gradients(done, gradients)

    found = iter(differentiable(*[tensor for call in calls for tensor in call.tensors]))
    done += [call._replace(results=list(itertools.islice(found, len(call.tensors)))) for call in calls]
    return [(list(call.results), _rows(call)) for call in done]


def _typed(call: Call) -> Typed:
    family, name = call.name.split("\n", 1)
    for tensor in call.tensors:
        if tensor.shape.rank is None:
            raise ValueError(
                f"{name}: XLA needs the number of dimensions at compile time, and a tensor's is unknown; set it with "
                "tf.ensure_shape"
            )
    members = [Member(tuple(tensor.shape), tensor.dtype.name) for tensor in call.tensors]
    operation = call.operation
    if operation.kind == "alltoall" and members[0].shape[0] is not None:
        checked_splits(None, members[0].shape[0], operation.process_set.size(), name)
    numbered = [name] if len(members) == 1 else [f"{name}[{index}]" for index in range(len(members))]
    names = operation.member_names or numbered
    return Typed(operation._replace(name=name, family=Family(family, 0, 0), member_names=names), members)


def _rows(call: Call) -> list[Any]:
    """For each tensor, how many rows come from each rank. XLA must know them, so every function computes them anew."""
    if call.operation.kind not in ("allgather", "alltoall"):
        return []
    size = call.operation.process_set.size()
    share = size if call.operation.kind == "alltoall" else 1
    return [tf.fill([size], tf.shape(tensor, tf.int64)[0] // share) for tensor in call.tensors]


def _gradients(calls: Sequence[Call], gradients: Sequence[Any]) -> list[Any]:
    given = iter(gradients)
    with belonging_to_xla():
        return [
            gradient
            for call in calls
            for gradient in derivatives[call.operation.kind](
                call._replace(rows=_rows(call)), *itertools.islice(given, len(call.tensors))
            )
        ]


def _prepare(typed: Sequence[Typed]) -> None:
    try:
        _register()
        if not tf.config.list_physical_devices("GPU"):
            return
        for operation, members in typed:
            dtypes = [_native.DTYPES[member.dtype] for member in members]
            if why := devices.problem_for_nccl(operation, dtypes) or devices.problem():
                raise RuntimeError(f"on a GPU: {why}")
    except RuntimeError as error:
        refuse_xla(f"{typed[0].operation.kind} ({error})")


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
