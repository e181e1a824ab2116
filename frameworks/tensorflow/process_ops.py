"""Operations that say where a rank stands when they run, and those that let ranks wait for each other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovodish import collectives
from horovodish.collectives.documentation import documented_as
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.tensorflow.failures import own_errors
from horovodish.tensorflow.library import native, run_native
from horovodish.tensorflow.names import as_input, operation_name
from horovodish.tensorflow.tracing import as_written, refuse_xla

__all__ = ["barrier", "join", "local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]

_THIS_HOST = -1


@as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """`rank()` at the time when it runs, as an int32 scalar; -1 when horovodish is not running.

    A function that was traced before another `init()` sees the new value.
    """
    return _place("rank_op", 0, name).rank


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The size of a process set at the time when it runs, as an int32 scalar; 0 if it is not in use on this rank."""
    return _place("size_op", process_set_id, name).size


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """`local_rank()` at the time when it runs, as an int32 scalar; -1 when horovodish is not running."""
    return _place("local_rank_op", _THIS_HOST, name).rank


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """`local_size()` at the time when it runs, as an int32 scalar; 0 when horovodish is not running."""
    return _place("local_size_op", _THIS_HOST, name).size


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set at the time when it runs: 1 or 0, as an int32 scalar."""
    return tf.cast(_place("process_set_included_op", process_set_id, name).rank >= 0, tf.int32)


@as_written
@documented_as(collectives.join)
def join(device: Any = -1) -> Any:
    """In a `tf.function` it does not join process sets.

    Args:
        device: Horovod's, where a rank that has joined keeps its zeros. Nothing is kept, so it has no meaning here.

    Returns:
        The rank that joined last: an int, or an int32 scalar in a function.

    Example:
        >>> for batch in batches_of_this_rank:  # as many as there are, not equally many on every rank
        ...     train(batch)
        >>> last = hvd.join()
    """
    if tf.executing_eagerly():
        return collectives.join()
    refuse_xla("join")
    return run_native(Operation("join"), as_input("join.noname.one"))


@as_written
@documented_as(collectives.barrier)
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Any:
    """Args:
        name: the operation's name, the same on every rank. Without it, the call is numbered.

    Returns:
        Nothing when executing eagerly; in a function the operation, which runs in the order of the program.
    """
    identity = checked_id(process_set)
    refuse_xla("barrier")
    with own_errors():
        given = as_input(operation_name("barrier", name, identity))
        return run_native(Operation("barrier", None, process_set), given)


def _place(asked_by: str, process_set_id: int, name: str | None) -> Any:
    refuse_xla(asked_by)
    return native.horovodish_place(process_set=process_set_id, name=name)
