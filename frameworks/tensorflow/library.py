"""The native operations: where their library is, and how one of them is called.

A collective is an asynchronous kernel that TensorFlow starts and the engine finishes; no thread waits for it, so any
number can be under way. To finish it, its callback must be kept, which takes for granted how TensorFlow's compiler lays
out a `std::function`. That is checked once, before the first collective. Where it is otherwise, a collective is three
operations: one submits it and gives a ticket, one looks again and again whether it is done, and one takes the results.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from horovodish import _native
from horovodish.collectives.operation import Operation
from horovodish.errors import LaunchError
from horovodish.tensorflow import xla
from horovodish.tensorflow.calls import Call, attributes_of
from horovodish.tensorflow.tracing import compiled_by_xla, in_graph_for_sessions
from horovodish.tensorflow.whole_steps import hold_writes

_IN_ANY_ORDER = ("Allreduce", "Allgather", "Broadcast", "Alltoall", "Reducescatter")


def _path() -> str:
    found = importlib.util.find_spec("horovodish._tensorflow_ops")
    if found is None or found.origin is None:
        raise LaunchError(
            "the native operations for TensorFlow (horovodish/_tensorflow_ops*.so) are not where horovodish is "
            "installed. Remedy: install it again, with pip"
        )
    return found.origin


def _loaded() -> Any:
    if not hasattr(ctypes.CDLL(None), "TF_NewKernelBuilder"):
        # Before 2.20 TensorFlow's functions are found only by those who link with it.
        ctypes.CDLL(str(Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"), ctypes.RTLD_GLOBAL)
    library = tf.load_op_library(_path())
    connect = ctypes.CDLL(_path()).horovodish_connect
    connect.argtypes = [ctypes.c_void_p]
    connect.restype = None
    connect(_native.engine_interface())
    return library


def _run_in_any_order() -> None:
    """Within a function, let TensorFlow start collectives as soon as their inputs are there, not one after another.

    It puts operations with side effects into the order of the program, unless they are known to be independent. Where
    a release has no such list, they run in that order, which is slower and as right.
    """
    known = getattr(auto_control_deps, "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS", None)
    if known is not None:
        parts = [f"Horovodish{name}{part}" for name in _IN_ANY_ORDER for part in ("", "Submit", "Take")]
        auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS = known | {*parts, "HorovodishLook"}


native = _loaded()
_run_in_any_order()


@functools.cache
def keeps_callbacks() -> bool:
    """Whether the callback of an asynchronous kernel can be kept.

    Not found out when this module is imported, because the first operation settles how TensorFlow is configured.
    """
    with tf.device("CPU:0"):
        return bool(native.horovodish_probe())


def _is_one_operation() -> bool:
    """True if a collective is one operation and not three. In graphs for sessions it always is.

    A session graph cannot be probed: running any operation fixes the configuration of later sessions. The kernel
    refuses a callback that it cannot keep.
    """
    if tf.executing_eagerly():
        return keeps_callbacks()
    with tf.init_scope():
        return in_graph_for_sessions() or keeps_callbacks()


def run(call: Call) -> tuple[list[Any], list[Any]]:
    """Add a collective to the graph, or run it when executing eagerly.

    Returns:
        Its results and, of an allgather or an alltoall, how many rows came from each rank, by member.
    """
    if compiled_by_xla():
        return xla.run([call])[0]
    kind, tensors, splits = call.operation.kind, call.tensors, call.operation.splits
    if kind == "allgather":
        outputs = run_native(call.operation, call.name, list(tensors), N=len(tensors))
        return list(outputs.gathered), list(outputs.rows)
    if kind == "alltoall":
        outputs = run_native(call.operation, call.name, tensors[0], tf.cast([] if splits is None else splits, tf.int64))
        return [outputs.received], [outputs.received_splits]
    if kind == "broadcast":
        return [run_native(call.operation, call.name, tensors[0])], []
    return list(run_native(call.operation, call.name, list(tensors))), []


def run_native(operation: Operation, *inputs: Any, **attributes: Any) -> Any:
    """As `run`, of an operation that XLA does not compile.

    Args:
        operation: what to do.
        inputs: its name, as `names.as_input` gives it, and its other inputs.
        attributes: those that do not follow from the operation.

    Returns:
        Its outputs, as TensorFlow gives them.
    """
    outputs = _run(f"horovodish_{operation.kind}", *inputs, **attributes_of(operation), **attributes)
    hold_writes(outputs)
    return outputs


def _run(function: str, *inputs: Any, **attributes: Any) -> Any:
    if _is_one_operation():
        return getattr(native, function)(*inputs, **attributes)
    ticket = getattr(native, f"{function}_submit")(*inputs, **attributes)
    settled = tf.while_loop(
        tf.logical_not, lambda _: (native.horovodish_look(ticket),), (native.horovodish_look(ticket),)
    )
    with tf.control_dependencies(settled):
        return getattr(native, f"{function}_take")(*inputs, ticket, **attributes)
