"""Collectives on groups of tensors: nothing of a group starts before all of it is there on every rank.

Each is to its members what the operation without `grouped_` is to one tensor, gradients included, and documented there.
A group is a list, of one tensor or more and as many on every rank; its name is that of the whole group. What gives a
handle or works in place is not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor
from torch.autograd import Function

from horovodish.compression import Compressor, check_compression
from horovodish.operation import Operation, checked_group, checked_op
from horovodish.process_sets import ProcessSet, global_process_set
from horovodish.reduce_ops import Average, ReduceOp
from horovodish.submission import Checking, Handle
from horovodish.torch.adapter import TENSORS
from horovodish.torch.autograd import Allgather, Allreduce, Reducescatter, is_recorded
from horovodish.torch.compression import Compression
from horovodish.torch.tensors import check_tensor

TensorT = TypeVar("TensorT", bound=Tensor)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors as a unit. Differentiable; collective; blocks.

    Args:
        tensors: at least one, of any shapes and dtypes; each the same on every rank.
        name: of the group.
        average, compression, op, prescale_factor, postscale_factor, process_set: as for `allreduce`, of all tensors.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: as `allreduce`, or `tensors` is empty.
        TypeError: `tensors` is one tensor.
        UnsupportedTensorError, MismatchError: as `allreduce`.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([loss, accuracy])
    """
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
    return _reduced(operation, Allreduce, tensors, compression)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """As `grouped_allreduce`, but gives a handle for the whole group. Collective; does not block."""
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
    return TENSORS.group(operation, tensors)


def grouped_allreduce_(
    tensors: Sequence[TensorT],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[TensorT]:
    """As `grouped_allreduce`, but writes the results into `tensors`, which must be contiguous. Collective; blocks.

    Not differentiable. After an error the contents of `tensors` are undefined.
    """
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor, in_place=True)
    TENSORS.group(operation, tensors, waits=True).wait()
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """As `grouped_allreduce_`, but gives a handle for the whole group. Collective; does not block."""
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor, in_place=True)
    return TENSORS.group(operation, tensors)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors as a unit. Differentiable; collective; blocks.

    Args:
        tensors: at least one; each as for `allgather`, and as many on every rank.
        name: of the group.
        process_set: the ranks that take part.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: `tensors` is empty.
        TypeError: `tensors` is one tensor.
        UnsupportedTensorError, MismatchError: as `allgather`.

    Example:
        >>> predictions, labels = hvd.grouped_allgather([predictions, labels])
    """
    operation = Operation("allgather", name, process_set)
    name, identity = operation.named()
    operation = operation._replace(name=name)
    with Checking("allgather", name, identity):
        tensors = checked_group(tensors, "allgather", TENSORS.noun)
    if any(map(is_recorded, tensors)):
        return list(Allgather.apply(operation, *tensors)[: len(tensors)])
    return TENSORS.group(operation, tensors, waits=True).wait()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Tensor]]:
    """As `grouped_allgather`, but gives a handle for the whole group. Collective; does not block."""
    return TENSORS.group(Operation("allgather", name, process_set), tensors)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors as a unit. Differentiable; collective; blocks.

    Args:
        tensors: at least one; each as for `reducescatter`.
        name: of the group.
        compression, op, process_set, prescale_factor, postscale_factor: as for `reducescatter`, of all tensors.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: as `reducescatter`, or `tensors` is empty.
        TypeError: `tensors` is one tensor.
        UnsupportedTensorError, MismatchError: as `reducescatter`.

    Example:
        >>> weights, biases = hvd.grouped_reducescatter([weight_gradients, bias_gradients])
    """
    operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
    return _reduced(operation, Reducescatter, tensors, compression)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """As `grouped_reducescatter`, but gives a handle for the whole group. Collective; does not block."""
    operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
    return TENSORS.group(operation, tensors)


def _reduced(
    operation: Operation, function: type[Function], tensors: Sequence[Tensor], compression: Compressor
) -> list[Tensor]:
    name, identity = operation.named()
    with Checking(operation.kind, name, identity):
        check_compression(compression)
        op = checked_op(operation.kind, name, operation.average, operation.op)
        operation = operation._replace(name=name, op=op, average=None)
        tensors = checked_group(tensors, operation.kind, TENSORS.noun)
        for tensor in tensors:
            check_tensor(tensor, name)
        pairs = [compression.compress(tensor) for tensor in tensors]
    payloads = [payload for payload, _ in pairs]
    if any(map(is_recorded, payloads)):
        results = function.apply(operation, *payloads)
    else:
        results = TENSORS.group(operation, payloads, waits=True).wait()
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
