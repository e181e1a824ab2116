"""The collectives, on one tensor and on groups. Collectives on whole objects are in `broadcast_state.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from horovodish import collectives
from horovodish.collectives.adapter import only
from horovodish.collectives.documentation import documented_as
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.gradients.compression import Compressor
from horovodish.tensorflow.compression import Compression
from horovodish.tensorflow.operations import (
    broadcasted,
    coded,
    exchanged,
    gathered,
    named,
    prepared,
    reduced,
    scattered,
)
from horovodish.tensorflow.sparse import reduced_slices
from horovodish.tensorflow.tracing import as_written, in_graph_for_sessions

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]

TensorOrSlices = TypeVar("TensorOrSlices", tf.Tensor, tf.IndexedSlices)


@as_written
@documented_as(collectives.allreduce)
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """In a `tf.function` it does not block: it is an operation that waits for nothing but its inputs, however many are
    under way. Without a name, calls are counted in the order that they are made: separately within each function, and
    for eager execution. Differentiable where `op` is `Average` or `Sum`: its gradient is the allreduce of the
    gradients, in the same way.

    Args:
        tensor: the rank's values, a tensor or what `tf.convert_to_tensor` takes, of the same shape and dtype on every
            rank; or `tf.IndexedSlices`, with any number of slices on each rank, for `Average` and `Sum`.
        device_dense, device_sparse: Horovod's, without effect here: TensorFlow chooses where the operation runs.
        compression: a cast or a codec for the values; see `Compression`.

    Returns:
        A new tensor; of IndexedSlices the slices of all ranks, where an index may occur once for each rank.

    Raises:
        MismatchError: the ranks disagree. In a function, TensorFlow raises one of `tf.errors` with the same text.

    Example:
        >>> mean_loss = hvd.allreduce(loss, name="loss")
    """
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
    return only(_reduced(operation, [tensor], compression))


@as_written
@documented_as(collectives.grouped_allreduce)
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[Any]:
    """Blocks and is differentiable as `allreduce`. IndexedSlices travel by themselves, the others together.

    Args:
        device_dense, device_sparse: Horovod's, without effect here: TensorFlow chooses where the operation runs.
        compression: as for `allreduce`, of all tensors.
    """
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
    return _reduced(operation, tensors, compression)


@as_written
@documented_as(collectives.reducescatter)
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Blocks as `allreduce`. Differentiable where `op` is `Average` or `Sum`: the gradient is made of the gradients of
    the rows, from the ranks that have them.

    Args:
        device_dense: Horovod's, without effect here: TensorFlow chooses where the operation runs.
        compression: a cast for the values; see `Compression`.

    Example:
        >>> own_rows = hvd.reducescatter(gradient, op=hvd.Sum)
    """
    operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
    return only(_scattered(operation, [tensor], compression))


@as_written
@documented_as(collectives.grouped_reducescatter)
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Blocks as `allreduce`, and is differentiable as `reducescatter`.

    Args:
        device_dense: Horovod's, without effect here: TensorFlow chooses where the operation runs.
        compression: as for `reducescatter`, of all tensors.
    """
    operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
    return _scattered(operation, tensors, compression)


@as_written
@documented_as(collectives.allgather)
def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Blocks as `allreduce`. Differentiable: the gradient is the sum over the ranks of the gradients of this rank's
    rows.

    Example:
        >>> predictions = hvd.allgather(predictions)
    """
    return only(grouped_allgather([tensor], name, process_set))


@as_written
@documented_as(collectives.grouped_allgather)
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Blocks as `allreduce`, and is differentiable as `allgather`."""
    results, _ = gathered(*prepared(Operation("allgather", name, process_set), tensors))
    return results


@as_written
@documented_as(collectives.broadcast)
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Blocks as `allreduce`. Differentiable: on the root the gradient is the sum of the gradients of all ranks, on the
    others it is zero.

    Example:
        >>> noise = hvd.broadcast(noise, root_rank=0)
    """
    operation, tensors = prepared(Operation("broadcast", name, process_set, root_rank=root_rank), [tensor])
    return broadcasted(operation, only(tensors))


@as_written
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Give every rank's variables the values that they have on one rank. Collective.

    Each variable takes over the memory that its value has arrived in. The root's variables are not written to.

    Args:
        variables: as many and of the same shapes and dtypes on every rank.
        root_rank, process_set: as for `broadcast`.
        name: the name of the operations, to which a number is added. Without it, the call is numbered.

    Returns:
        `variables`, after the assignment; in a graph for sessions tensors of their values after it, for a session to
        ask for.

    Raises:
        ValueError: as `broadcast`.

    Example:
        >>> hvd.broadcast_(model.variables, root_rank=0)
    """
    operation = named(Operation("broadcast", name, process_set, root_rank=root_rank))
    is_root = process_set.ranks[process_set.rank()] == operation.root_rank
    updated: list[Any] = []
    for number, variable in enumerate(variables):
        sent = broadcasted(operation._replace(name=f"{operation.name}[{number}]"), tf.convert_to_tensor(variable))
        if in_graph_for_sessions():
            with tf.control_dependencies([sent if is_root else variable.assign(sent, read_value=False)]):
                updated.append(variable.read_value())
        elif not is_root:
            variable.assign(sent)
    return updated or list(variables)


@as_written
@documented_as(collectives.alltoall)
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Blocks as `allreduce`. Differentiable: the gradients of the rows go back the way that the rows came.

    Raises:
        ValueError: in a function, TensorFlow raises `tf.errors.InvalidArgumentError` in its place.

    Example:
        >>> received, counts = hvd.alltoall(rows, splits=[2, 0])
    """
    operation, tensors = prepared(Operation("alltoall", name, process_set, splits=splits), [tensor])
    received, counts = exchanged(operation, only(tensors))
    return received if splits is None else (received, counts)


def _reduced(operation: Operation, tensors: Sequence[Any], compression: Compressor) -> list[Any]:
    operation, results = prepared(operation, tensors)
    operation, compression = coded(operation, compression)
    dense = [index for index, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    for index in set(range(len(results))).difference(dense):
        name = operation.name if len(results) == 1 else f"{operation.name}[{index}]"
        results[index] = reduced_slices(operation._replace(name=name), results[index], compression)
    found = _compressed(reduced, operation, [results[index] for index in dense], compression) if dense else []
    for index, result in zip(dense, found, strict=True):
        results[index] = result
    return results


def _scattered(operation: Operation, tensors: Sequence[Any], compression: Compressor) -> list[tf.Tensor]:
    operation, tensors = prepared(operation, tensors)
    operation, compression = coded(operation, compression)
    return _compressed(scattered, operation, tensors, compression)


def _compressed(
    run: Callable[[Operation, list[tf.Tensor]], list[tf.Tensor]],
    operation: Operation,
    tensors: Sequence[tf.Tensor],
    compression: Compressor,
) -> list[tf.Tensor]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = run(operation, [payload for payload, _ in pairs])
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs, strict=True)]
