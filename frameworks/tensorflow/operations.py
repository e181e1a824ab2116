"""The collectives on dense tensors, once it is clear what they are called: arguments are checked here.

They run in graphs and eagerly, and have the gradients of `autograd.py`. Errors of the engine are raised as ours when
executing eagerly; in a function TensorFlow raises one of `tf.errors` with the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from horovodish._native import DTYPES
from horovodish.arrays import REDUCED_AS
from horovodish.errors import UnsupportedTensorError
from horovodish.operation import checked_splits
from horovodish.process_sets import ProcessSet, checked_id
from horovodish.reduce_ops import Adasum, ReduceOp
from horovodish.submission import Checking
from horovodish.tensorflow import xla
from horovodish.tensorflow.failures import own_errors
from horovodish.tensorflow.library import call
from horovodish.tensorflow.names import as_input
from horovodish.tensorflow.sets import attribute_of
from horovodish.tensorflow.tracing import compiled_by_xla, refuse_xla


@dataclass(frozen=True)
class Reduction:
    """What an allreduce or reducescatter does with its tensors."""

    op: ReduceOp
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet

    @property
    def attributes(self) -> dict[str, Any]:
        """As the operations take it."""
        # An attribute of TensorFlow's is float32 at most.
        factors = f"{float(self.prescale_factor)!r} {float(self.postscale_factor)!r}"
        return {"op": int(self.op), "factors": factors, "process_set": attribute_of(self.process_set)}


@contextmanager
def checking(kind: str, name: str, process_set_id: int) -> Iterator[None]:
    """As `submission.Checking`, when executing eagerly. While a function is traced no rank waits for its operations."""
    if not tf.executing_eagerly():
        yield
        return
    with Checking(kind, name, process_set_id):
        yield


def converted(tensors: Sequence[Any], kind: str, name: str, process_set: ProcessSet) -> list[tf.Tensor]:
    """What a user passes, as tensors."""
    with checking(kind, name, checked_id(process_set)):
        for tensor in tensors:
            if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
                parts = "flat_values and row_splits" if isinstance(tensor, tf.RaggedTensor) else "values and indices"
                raise UnsupportedTensorError(
                    f"{name}: a {type(tensor).__name__} cannot travel as a whole; pass its {parts}, or make it dense"
                )
        return [tf.convert_to_tensor(tensor) for tensor in tensors]


def reduced(tensors: Sequence[tf.Tensor], name: str, reduction: Reduction) -> list[tf.Tensor]:
    """The allreduce of a group."""
    return reduced_groups([(tensors, name)], reduction)[0]


def reduced_groups(groups: Sequence[tuple[Sequence[tf.Tensor], str]], reduction: Reduction) -> list[list[tf.Tensor]]:
    """The allreduces of several groups, each with its name."""
    attributes = reduction.attributes
    for tensors, name in groups:
        with checking("allreduce", name, checked_id(reduction.process_set)):
            check_dtypes(tensors, name, reduction.op)
    if groups and compiled_by_xla():
        return xla.run([xla.Call("Allreduce", as_input(name), tensors, attributes) for tensors, name in groups])
    with own_errors():
        return [list(call("Allreduce", as_input(name), list(tensors), **attributes)) for tensors, name in groups]


def scattered(tensors: Sequence[tf.Tensor], name: str, reduction: Reduction) -> list[tf.Tensor]:
    """The reducescatter of a group."""
    attributes = reduction.attributes
    with checking("reducescatter", name, checked_id(reduction.process_set)):
        if reduction.op is Adasum:
            raise ValueError(f"{name}: op=Adasum is for allreduce; use op=Average or op=Sum")
        check_dtypes(tensors, name, reduction.op)
        for tensor in tensors:
            _check_rows(tensor, name, "deal out")
    with own_errors():
        return list(call("Reducescatter", as_input(name), list(tensors), **attributes))


def gathered(
    tensors: Sequence[tf.Tensor], name: str, process_set: ProcessSet
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The allgather of a group, and for each tensor how many rows each rank gave."""
    identity = checked_id(process_set)
    with checking("allgather", name, identity):
        check_dtypes(tensors, name, None)
        tensors = [tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor for tensor in tensors]
    with own_errors():
        outputs = call("Allgather", as_input(name), tensors, N=len(tensors), process_set=attribute_of(process_set))
    return list(outputs.gathered), list(outputs.rows)


def broadcasted(tensor: tf.Tensor, root_rank: int, name: str, process_set: ProcessSet) -> tf.Tensor:
    """The broadcast from a rank that is in the process set."""
    identity = checked_id(process_set)
    with checking("broadcast", name, identity):
        check_dtypes([tensor], name, None)
    with own_errors():
        return call("Broadcast", as_input(name), tensor, root_rank=root_rank, process_set=attribute_of(process_set))


def exchanged(tensor: tf.Tensor, splits: Any, name: str, process_set: ProcessSet) -> tuple[tf.Tensor, tf.Tensor]:
    """The alltoall, and how many rows each rank sent. `splits` is None for even ones."""
    identity = checked_id(process_set)
    with checking("alltoall", name, identity):
        check_dtypes([tensor], name, None)
        _check_rows(tensor, name, "send")
        if splits is not None:
            refuse_xla("alltoall with splits")
        if tf.executing_eagerly():
            given = splits.numpy().tolist() if tf.is_tensor(splits) else splits
            splits = checked_splits(given, int(tensor.shape[0]), process_set.size(), name)
        counts = tf.cast([] if splits is None else splits, tf.int64)
    with own_errors():
        outputs = call("Alltoall", as_input(name), tensor, counts, process_set=attribute_of(process_set))
    return outputs.received, outputs.received_splits


def check_group(tensors: object, kind: str) -> None:
    """Passes groups with members.

    Raises:
        TypeError: one tensor instead of a group, whose rows would be taken for the members.
        ValueError: the group is empty.
    """
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"grouped_{kind}: expected a list of tensors, got {type(tensors).__name__}; pass [tensor]")
    if not tensors:
        raise ValueError(f"grouped_{kind}: the group is empty; pass at least one tensor")


def check_dtypes(tensors: Sequence[tf.Tensor], name: str, op: ReduceOp | None) -> None:
    """Raise unless the engine can move these tensors, and reduce them by `op` if one is given.

    Raises:
        UnsupportedTensorError: a dtype is not for it.
    """
    for tensor in tensors:
        kind = tensor.dtype.name
        if kind not in DTYPES:
            raise UnsupportedTensorError(f"{name}: dtype {kind} is not supported; supported are {', '.join(DTYPES)}")
        if op is not None and kind in REDUCED_AS:
            raise UnsupportedTensorError(
                f"{name}: {kind} tensors cannot be reduced; pass tf.cast(tensor, tf.{REDUCED_AS[kind]})"
            )
        if op is Adasum and not tensor.dtype.is_floating:
            raise UnsupportedTensorError(f"{name}: op=Adasum needs floating-point numbers, not {kind}; use op=Sum")


def _check_rows(tensor: tf.Tensor, name: str, verb: str) -> None:
    if tensor.shape.rank == 0:
        raise ValueError(f"{name}: a tensor of zero dimensions has no rows to {verb}; pass one with a dimension")
