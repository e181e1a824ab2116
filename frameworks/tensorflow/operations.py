"""The collectives on dense tensors, each as an `Operation`: arguments are checked here.

They run in graphs and eagerly, and have the gradients of `autograd.py`. Errors of the engine are raised as ours when
executing eagerly; in a function TensorFlow raises one of `tf.errors` with the same text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from horovodish.collectives.adapter import check_has_rows, checked, checked_group, checked_splits, identified
from horovodish.collectives.arrays import checked_dtype
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.submission import RefuseOnError
from horovodish.errors import UnsupportedTensorError
from horovodish.gradients.compression import Compressor, with_codec
from horovodish.tensorflow import xla
from horovodish.tensorflow.calls import Call, attributes_of
from horovodish.tensorflow.failures import own_errors
from horovodish.tensorflow.library import native, run
from horovodish.tensorflow.names import as_input, operation_name
from horovodish.tensorflow.tracing import compiled_by_xla, refuse_xla


@contextmanager
def refuse_on_error(operation: Operation) -> Iterator[None]:
    """As `submission.RefuseOnError`, when executing eagerly. While a function is traced, no rank waits for it."""
    if not tf.executing_eagerly():
        yield
        return
    with RefuseOnError(operation.kind, *identified(operation)):
        yield


def named(operation: Operation) -> Operation:
    """The operation with its name, its reduce op and its root.

    Raises:
        ValueError: the op or the root is none.
    """
    name = operation_name(operation.kind, operation.name, checked_id(operation.process_set))
    operation = operation._replace(name=name)
    with refuse_on_error(operation):
        return checked(operation)


def prepared(operation: Operation, tensors: Sequence[Any]) -> tuple[Operation, list[Any]]:
    """An operation as `named` gives it, and its tensors; the slices of an allreduce stay what they are.

    Raises:
        TypeError: one tensor instead of a group, whose rows would be taken for the members.
        ValueError: the group is empty, or the op or the root is none.
        UnsupportedTensorError: a tensor that cannot travel as a whole.
    """
    kind, operation = operation.kind, named(operation)
    with refuse_on_error(operation):
        tensors = checked_group(tensors, kind, "tensor")
        takes_slices = kind == "allreduce"
        return operation, [
            tensor if takes_slices and isinstance(tensor, tf.IndexedSlices) else _converted(tensor, str(operation.name))
            for tensor in tensors
        ]


def coded(operation: Operation, compression: Compressor) -> tuple[Operation, Compressor]:
    """As `with_codec`."""
    with refuse_on_error(operation):
        return with_codec(operation, compression)


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
        Call(
            operation,
            as_input(str(operation.name), "" if index else described, operation.member_names),
            list(tensors),
        )
        for index, (operation, tensors) in enumerate(groups)
    ]
    if groups and compiled_by_xla():
        return [results for results, _ in xla.run(calls)]
    with own_errors():
        return [run(call)[0] for call in calls]


def room_for(operation: Operation, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[int]]:
    """New tensors that are to get the allreduce of a group, and have its gradients. Only eagerly; not collective.

    The caller has the engine write into their memory before anybody reads them.

    Args:
        operation: as for `reduced_groups`.
        tensors: of the group, in host memory.

    Returns:
        The new tensors; and the addresses of `tensors` and, after these, of the new ones.
    """
    check_dtypes(operation, tensors)
    room = native.horovodish_allreduce_room(as_input(str(operation.name)), list(tensors), **attributes_of(operation))
    return list(room.reduced), room.addresses.numpy().tolist()


def scattered(operation: Operation, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The reducescatter of a group."""
    with refuse_on_error(operation):
        check_dtypes(operation, tensors)
        for tensor in tensors:
            check_has_rows("reducescatter", str(operation.name), tensor.shape.rank, "tensor")
    return _run(operation, tensors)[0]


def gathered(operation: Operation, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The allgather of a group, and for each tensor how many rows each rank gave."""
    with refuse_on_error(operation):
        check_dtypes(operation, tensors)
        tensors = [tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor for tensor in tensors]
    return _run(operation, tensors)


def broadcasted(operation: Operation, tensor: tf.Tensor) -> tf.Tensor:
    """The broadcast from a rank that is in the process set."""
    with refuse_on_error(operation):
        check_dtypes(operation, [tensor])
    return _run(operation, [tensor])[0][0]


def exchanged(operation: Operation, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The alltoall, and how many rows each rank sent."""
    name, splits = str(operation.name), operation.splits
    with refuse_on_error(operation):
        check_dtypes(operation, [tensor])
        check_has_rows("alltoall", name, tensor.shape.rank, "tensor")
        if splits is not None:
            refuse_xla("alltoall with splits")
        if tf.executing_eagerly():
            given = splits.numpy().tolist() if tf.is_tensor(splits) else splits
            splits = checked_splits(given, int(tensor.shape[0]), operation.process_set.size(), name)
    (received,), (counts,) = _run(operation._replace(splits=splits), [tensor])
    return received, counts


def _run(operation: Operation, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    with own_errors():
        return run(Call(operation, as_input(str(operation.name)), tensors))


def check_dtypes(operation: Operation, tensors: Sequence[tf.Tensor]) -> None:
    """Raise unless the engine can move these tensors, and reduce them if the operation has a reduce op.

    Raises:
        UnsupportedTensorError: a dtype is not for it.
    """
    for tensor in tensors:
        checked_dtype(tensor.dtype.name, str(operation.name), operation.op, "tensor", "tf.cast(tensor, tf.{})")
