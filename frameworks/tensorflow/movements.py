"""`allgather`, `broadcast` and `alltoall`: collectives that move values as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovodish.array_submission import checked_root
from horovodish.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.tensorflow.names import operation_name
from horovodish.tensorflow.operations import broadcasted, check_group, checking, converted, exchanged, gathered
from horovodish.tensorflow.tracing import as_written


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
    return _all_gathered([tensor], name, process_set)[0]


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
    return _all_gathered(tensors, name, process_set)


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
    identity = checked_id(process_set)
    name = operation_name("broadcast", name, identity)
    with checking("broadcast", name, identity):
        root = checked_root(root_rank, process_set)
    return broadcasted(converted([tensor], "broadcast", name, process_set)[0], root, name, process_set)


@as_written
def broadcast_(
    variables: Sequence[tf.Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Variable]:
    """Give every rank's variables the values that they have on one rank. Collective.

    Each variable takes over the memory that its value has arrived in; those of the root are not written to.

    Args:
        variables: as many and of the same shapes and dtypes on every rank.
        root_rank, process_set: as for `broadcast`.
        name: of the operations, which are numbered; counted when not given.

    Returns:
        `variables`, after the assignment.

    Raises:
        ValueError: as `broadcast`.

    Example:
        >>> hvd.broadcast_(model.variables, root_rank=0)
    """
    identity = checked_id(process_set)
    name = operation_name("broadcast", name, identity)
    with checking("broadcast", name, identity):
        root = checked_root(root_rank, process_set)
    is_root = process_set.ranks[process_set.rank()] == root
    for number, variable in enumerate(variables):
        sent = broadcasted(tf.convert_to_tensor(variable), root, f"{name}[{number}]", process_set)
        if not is_root:
            variable.assign(sent)
    return list(variables)


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
    identity = checked_id(process_set)
    name = operation_name("alltoall", name, identity)
    received, counts = exchanged(converted([tensor], "alltoall", name, process_set)[0], splits, name, process_set)
    return received if splits is None else (received, counts)


def _all_gathered(tensors: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[tf.Tensor]:
    identity = checked_id(process_set)
    name = operation_name("allgather", name, identity)
    with checking("allgather", name, identity):
        check_group(tensors, "allgather")
    return gathered(converted(tensors, "allgather", name, process_set), name, process_set)[0]
