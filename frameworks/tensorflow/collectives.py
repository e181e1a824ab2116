"""The collectives, on one tensor and on groups. Those of whole objects are in `broadcast_state.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from horovodish.collectives.operation import Operation, only
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.collectives.reduce_ops import Average, ReduceOp
from horovodish.gradients.compression import Compressor
from horovodish.tensorflow.compression import Compression
from horovodish.tensorflow.operations import broadcasted, checked, exchanged, gathered, prepared, reduced, scattered
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
    """Reduce the tensors of all ranks, element by element, and give the result to every rank. Collective.

    When executing eagerly it blocks; in a `tf.function` it is an operation that waits for nothing but its inputs,
    however many are under way. Differentiable for `Average` and `Sum`: the gradient is reduced in the same way.

    Args:
        tensor: the rank's values, a tensor or what `tf.convert_to_tensor` takes, of the same shape and dtype on every
            rank; or `tf.IndexedSlices`, of which each rank may have any number.
        average: Horovod's older way to choose between `Average` and `Sum`.
        device_dense, device_sparse: Horovod's; TensorFlow knows where the operation runs, so they have no meaning here.
        compression: what travels; see `Compression`.
        op: `Average` (the default), `Sum`, `Adasum`, `Min`, `Max` or `Product`; `Average` or `Sum` for IndexedSlices.
        prescale_factor, postscale_factor: multiply the inputs and the result.
        name: the operation's name, the same on every rank. Without it, calls are counted: within a function in the
            order in which it makes them, when executing eagerly in the order in which they are made.
        process_set: the ranks that take part.

    Returns:
        A new tensor; of IndexedSlices those of all ranks, where an index may occur once for each rank.

    Raises:
        ValueError: `op` and `average` are both given, or `op` or `compression` is none.
        UnsupportedTensorError: a dtype that cannot be reduced.
        MismatchError: the ranks disagree. In a function, TensorFlow raises one of `tf.errors` with the same text.
            `horovodish.collectives` lists the other errors.

    Example:
        >>> mean_loss = hvd.allreduce(loss, name="loss")
    """
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
    return only(_reduced(operation, [tensor], compression))


@as_written
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
    """`allreduce` of several tensors as a unit: nothing of it starts before all of it is there on every rank.

    Args:
        tensors: at least one; each as for `allreduce`. IndexedSlices travel by themselves, the others together.
        name: of the group.
        average, compression, op, prescale_factor, postscale_factor, process_set: as for `allreduce`, of all tensors.
        device_dense, device_sparse: as for `allreduce`.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError, UnsupportedTensorError, MismatchError: as `allreduce`, or `tensors` is empty.
        TypeError: `tensors` is no list.

    Example:
        >>> loss, accuracy = hvd.grouped_allreduce([loss, accuracy])
    """
    operation = Operation("allreduce", name, process_set, op, average, prescale_factor, postscale_factor)
    return _reduced(operation, tensors, compression)


@as_written
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
    """Reduce the tensors of all ranks and give every rank some rows of the result. Collective; differentiable.

    Args:
        tensor: the rank's values, of one dimension or more; the same shape on every rank.
        device_dense: as for `allreduce`.
        compression, name, process_set, prescale_factor, postscale_factor: as for `allreduce`.
        op: as for `allreduce`, but not `Adasum`.

    Returns:
        A new tensor. The rows are dealt out in the order of the ranks, as evenly as possible: where the first dimension
        cannot be divided by the number of ranks, the first ranks get one row more.

    Raises:
        ValueError: `op` is `Adasum` or no reduce op, or the tensor has zero dimensions.
        UnsupportedTensorError, MismatchError: as `allreduce`.

    Example:
        >>> own_rows = hvd.reducescatter(gradient, op=hvd.Sum)
    """
    operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
    return only(_scattered(operation, [tensor], compression))


@as_written
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
    """`reducescatter` of several tensors as a unit. Collective; differentiable.

    Args:
        tensors: at least one; each as for `reducescatter`.
        name: of the group.
        device_dense, compression, op, process_set, prescale_factor, postscale_factor: as for `reducescatter`.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError, UnsupportedTensorError, MismatchError: as `reducescatter`, or `tensors` is empty.
        TypeError: `tensors` is no list.

    Example:
        >>> weights, biases = hvd.grouped_reducescatter([weight_gradients, bias_gradients])
    """
    operation = Operation("reducescatter", name, process_set, op, None, prescale_factor, postscale_factor)
    return _scattered(operation, tensors, compression)


@as_written
def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """Put the tensors of all ranks one after another, along the first dimension. Collective; differentiable.

    Blocks when executing eagerly; see `allreduce` for functions, names and errors.

    Args:
        tensor: the rank's rows; only their number may differ between ranks. A scalar counts as one row.
        name: the operation's name, the same on every rank; counted when not given.
        process_set: the ranks that take part.

    Returns:
        A new tensor with the rows of all ranks, in the order of the ranks.

    Example:
        >>> predictions = hvd.allgather(predictions)
    """
    return only(grouped_allgather([tensor], name, process_set))


@as_written
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """`allgather` of several tensors as a unit. Collective; differentiable.

    Args:
        tensors: at least one; each as for `allgather`, and as many on every rank.
        name: of the group.
        process_set: the ranks that take part.

    Returns:
        New tensors, in the order of `tensors`.

    Raises:
        ValueError: `tensors` is empty.
        TypeError: `tensors` is no list.

    Example:
        >>> predictions, labels = hvd.grouped_allgather([predictions, labels])
    """
    results, _ = gathered(*prepared(Operation("allgather", name, process_set), tensors))
    return results


@as_written
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Give every rank the tensor of one rank. Collective; differentiable.

    Args:
        tensor: on the root its value; on the others any tensor of the same shape and dtype.
        root_rank: whose tensor to send, a rank of the world, the same on every rank.
        name, process_set: as for `allgather`.

    Returns:
        A new tensor.

    Raises:
        ValueError: there is no rank `root_rank` in the process set.

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

    Each variable takes over the memory that its value has arrived in; those of the root are not written to.

    Args:
        variables: as many and of the same shapes and dtypes on every rank.
        root_rank, process_set: as for `broadcast`.
        name: of the operations, which are numbered; counted when not given.

    Returns:
        `variables`, after the assignment; in a graph for sessions tensors of their values after it, for a session to
        ask for.

    Raises:
        ValueError: as `broadcast`.

    Example:
        >>> hvd.broadcast_(model.variables, root_rank=0)
    """
    operation = checked(Operation("broadcast", name, process_set, root_rank=root_rank))
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
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send some rows to every rank. Collective; differentiable.

    Args:
        tensor: the rank's rows, those for the first rank first.
        splits: how many rows go to each rank, one number per rank that add up to the rows of `tensor`; without it,
            as many to each.
        name, process_set: as for `allgather`.

    Returns:
        The rows that came, in the order of the ranks; with `splits`, also how many came from each rank, as int64.

    Raises:
        ValueError: `splits` does not fit, or the rows cannot be divided evenly without it. In a function, TensorFlow
            raises `tf.errors.InvalidArgumentError`.

    Example:
        >>> received, counts = hvd.alltoall(rows, splits=[2, 0])
    """
    operation, tensors = prepared(Operation("alltoall", name, process_set, splits=splits), [tensor])
    received, counts = exchanged(operation, only(tensors))
    return received if splits is None else (received, counts)


def _reduced(operation: Operation, tensors: Sequence[Any], compression: Compressor) -> list[Any]:
    operation, results = prepared(operation, tensors, compression)
    dense = [index for index, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    for index in set(range(len(results))).difference(dense):
        name = operation.name if len(results) == 1 else f"{operation.name}[{index}]"
        results[index] = reduced_slices(operation._replace(name=name), results[index], compression)
    found = _compressed(reduced, operation, [results[index] for index in dense], compression) if dense else []
    for index, result in zip(dense, found, strict=True):
        results[index] = result
    return results


def _scattered(operation: Operation, tensors: Sequence[Any], compression: Compressor) -> list[tf.Tensor]:
    operation, tensors = prepared(operation, tensors, compression)
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
