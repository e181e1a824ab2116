"""The collectives on dense tensors, each as an `Operation`: arguments are checked here.

They run in graphs and eagerly, and have the gradients of `autograd.py`. Errors of the engine are raised as ours when
executing eagerly; in a function TensorFlow raises one of `tf.errors` with the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from horovodish._native import DTYPES
from horovodish.collectives.arrays import REDUCED_AS
from horovodish.collectives.operation import Operation, checked_op, checked_root, checked_splits
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.reduce_ops import Adasum
from horovodish.collectives.submission import RefuseOnError
from horovodish.errors import UnsupportedTensorError
from horovodish.gradients.compression import Compressor, NoneCompressor, check_compression
from horovodish.tensorflow import xla
from horovodish.tensorflow.failures import own_errors
from horovodish.tensorflow.library import call
from horovodish.tensorflow.names import as_input, operation_name
from horovodish.tensorflow.sets import attribute_of
from horovodish.tensorflow.tracing import compiled_by_xla, refuse_xla


@contextmanager
def refuse_on_error(operation: Operation) -> Iterator[None]:
    """As `submission.RefuseOnError`, when executing eagerly. While a function is traced, no rank waits for it."""
    if not tf.executing_eagerly():
        yield
        return
    with RefuseOnError(operation.kind, *operation.named()):
        yield


def checked(operation: Operation) -> Operation:
    """The operation with its name, its reduce op and its root.

    Raises:
        ValueError: the op or the root is none.
    """
    kind, process_set = operation.kind, operation.process_set
    operation = operation._replace(name=operation_name(kind, operation.name, checked_id(process_set)))
    with refuse_on_error(operation):
        if kind in ("allreduce", "reducescatter"):
            op = checked_op(kind, str(operation.name), operation.average, operation.op)
            return operation._replace(op=op, average=None)
        if kind == "broadcast":
            return operation._replace(root_rank=checked_root(operation.root_rank, process_set))
    return operation


def prepared(
    operation: Operation, tensors: Sequence[Any], compression: Compressor = NoneCompressor
) -> tuple[Operation, list[Any]]:
    """An operation as `checked` gives it, and its tensors; the slices of an allreduce stay what they are.

    Raises:
        TypeError: one tensor instead of a group, whose rows would be taken for the members.
        ValueError: the group is empty, or the op, the root or the compression is none.
        UnsupportedTensorError: a tensor that cannot travel as a whole.
    """
    kind, operation = operation.kind, checked(operation)
    with refuse_on_error(operation):
        if not isinstance(tensors, list | tuple):
            raise TypeError(f"grouped_{kind}: expected a list of tensors, got {type(tensors).__name__}; pass [tensor]")
        if not tensors:
            raise ValueError(f"grouped_{kind}: the group is empty; pass at least one tensor")
        check_compression(compression)
        takes_slices = kind == "allreduce"
        return operation, [
            tensor if takes_slices and isinstance(tensor, tf.IndexedSlices) else _converted(tensor, str(operation.name))
            for tensor in tensors
        ]


def _converted(tensor: Any, name: str) -> tf.Tensor:
    if isinstance(tensor, tf.RaggedTensor | tf.SparseTensor):
        parts = "flat_values and row_splits" if isinstance(tensor, tf.RaggedTensor) else "values and indices"
        raise UnsupportedTensorError(
            f"{name}: a {type(tensor).__name__} cannot travel as a whole; pass its {parts}, or make it dense"
        )
    return tf.convert_to_tensor(tensor)


def reduced(operation: Operation, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The allreduce of a group."""
    return reduced_groups([(operation, tensors)])[0]


def reduced_groups(
    groups: Sequence[tuple[Operation, Sequence[tf.Tensor]]], described: str = ""
) -> list[list[tf.Tensor]]:
    """The allreduces of several groups. `described`: as `as_input` takes it, for one of them."""
    for operation, tensors in groups:
        with refuse_on_error(operation):
            check_dtypes(operation, tensors)
    calls = [
        (as_input(str(operation.name), "" if index else described), list(tensors), _attributes(operation))
        for index, (operation, tensors) in enumerate(groups)
    ]
    if groups and compiled_by_xla():
        return xla.run([xla.Call("Allreduce", *parts) for parts in calls])
    with own_errors():
        return [list(call("Allreduce", name, tensors, **attributes)) for name, tensors, attributes in calls]


def scattered(operation: Operation, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The reducescatter of a group."""
    with refuse_on_error(operation):
        check_dtypes(operation, tensors)
        for tensor in tensors:
            _check_rows(tensor, operation, "deal out")
    with own_errors():
        return list(call("Reducescatter", as_input(str(operation.name)), list(tensors), **_attributes(operation)))


def gathered(operation: Operation, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The allgather of a group, and for each tensor how many rows each rank gave."""
    with refuse_on_error(operation):
        check_dtypes(operation, tensors)
        tensors = [tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor for tensor in tensors]
    process_set = attribute_of(operation.process_set)
    with own_errors():
        outputs = call("Allgather", as_input(str(operation.name)), tensors, N=len(tensors), process_set=process_set)
    return list(outputs.gathered), list(outputs.rows)


def broadcasted(operation: Operation, tensor: tf.Tensor) -> tf.Tensor:
    """The broadcast from a rank that is in the process set."""
    root, process_set = operation.root_rank, attribute_of(operation.process_set)
    with refuse_on_error(operation):
        check_dtypes(operation, [tensor])
    with own_errors():
        return call("Broadcast", as_input(str(operation.name)), tensor, root_rank=root, process_set=process_set)


def exchanged(operation: Operation, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The alltoall, and how many rows each rank sent."""
    name, splits, process_set = str(operation.name), operation.splits, operation.process_set
    with refuse_on_error(operation):
        check_dtypes(operation, [tensor])
        _check_rows(tensor, operation, "send")
        if splits is not None:
            refuse_xla("alltoall with splits")
        if tf.executing_eagerly():
            given = splits.numpy().tolist() if tf.is_tensor(splits) else splits
            splits = checked_splits(given, int(tensor.shape[0]), process_set.size(), name)
        counts = tf.cast([] if splits is None else splits, tf.int64)
    with own_errors():
        outputs = call("Alltoall", as_input(name), tensor, counts, process_set=attribute_of(process_set))
    return outputs.received, outputs.received_splits


def _attributes(operation: Operation) -> dict[str, Any]:
    """How TensorFlow's operations take a reduction."""
    # An attribute of TensorFlow's is float32 at most.
    factors = f"{float(operation.prescale_factor)!r} {float(operation.postscale_factor)!r}"
    op = checked_op(operation.kind, str(operation.name), operation.average, operation.op)
    return {"op": int(op), "factors": factors, "process_set": attribute_of(operation.process_set)}


def check_dtypes(operation: Operation, tensors: Sequence[tf.Tensor]) -> None:
    """Raise unless the engine can move these tensors, and reduce them if the operation has a reduce op.

    Raises:
        UnsupportedTensorError: a dtype is not for it.
    """
    name, op = operation.name, operation.op
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


def _check_rows(tensor: tf.Tensor, operation: Operation, verb: str) -> None:
    if tensor.shape.rank == 0:
        raise ValueError(
            f"{operation.name}: a tensor of zero dimensions has no rows to {verb}; pass one with a dimension"
        )
