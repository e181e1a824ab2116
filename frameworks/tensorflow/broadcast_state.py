"""Starting alike: variables and objects of one rank on every rank."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from horovodish.collectives import objects
from horovodish.collectives.adapter import checked_root, variables_to_send
from horovodish.collectives.comparison import Named, compared_on_all_ranks
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.submission import generated_name
from horovodish.gradients.plan import name_of
from horovodish.tensorflow.collectives import broadcast_
from horovodish.tensorflow.names import operation_name
from horovodish.tensorflow.operations import broadcasted
from horovodish.tensorflow.tracing import as_written, in_graph_for_sessions

__all__ = ["allgather_object", "broadcast_object", "broadcast_object_fn", "broadcast_variables"]


@as_written
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give every rank's variables the values that they have on one rank. Collective; blocks when executing eagerly.

    The root's variables stay as they are, bit by bit.

    Args:
        variables: a model's or an optimizer's, in the same order, of the same shapes and dtypes on every rank; None is
            passed over.
        root_rank: the rank whose values to send, counted among all ranks, the same on every rank.
        process_set: the ranks that take part.
        inplace: one after another, so that there is memory for one more at a time. Otherwise, in a function, all travel
            at once.

    Returns:
        Nothing; in a graph for sessions the operation that does it, which a session must run.

    Raises:
        ValueError: there is no rank `root_rank` in the process set.
        MismatchError: the ranks' variables differ in number, shape or dtype.

    Example:
        >>> hvd.broadcast_variables(model.variables, root_rank=0)
        >>> hvd.broadcast_variables(optimizer.variables, root_rank=0)
    """
    present = [variable for variable in variables_to_send(variables) if variable is not None]
    name = _checked_alike(present, root_rank, process_set)
    if in_graph_for_sessions():
        return tf.group(*broadcast_(present, root_rank, name, process_set))
    if inplace:
        broadcast_(present, root_rank, name, process_set)
        finalize_layers(present)
        return None
    is_root = process_set.ranks[process_set.rank()] == root_rank
    tensors = [tf.convert_to_tensor(variable) for variable in present]
    sends = [
        Operation("broadcast", f"{name}[{number}]", process_set, root_rank=root_rank) for number in range(len(tensors))
    ]
    sent = [broadcasted(operation, tensor) for operation, tensor in zip(sends, tensors, strict=True)]
    for variable, value in zip([] if is_root else present, sent, strict=False):
        variable.assign(value)
    finalize_layers(present)
    return None


def finalize_layers(variables: list[Any]) -> None:
    """Have layers of Keras that make constants of these variables, such as Normalization, make them anew."""
    if "keras" in sys.modules and tf.executing_eagerly():
        layers = importlib.import_module("horovodish.keras.layer_state")
        layers.finalize(layers.layers_with(variables))


def broadcast_object(
    obj: object,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As `horovodish.broadcast_object`. `session` is Horovod's; none is needed, so it has no meaning here."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[object], Any]:
    """A function that broadcasts the object that it is given; see `broadcast_object`.

    Example:
        >>> send = hvd.broadcast_object_fn(root_rank=0)
        >>> epoch = send(epoch)
    """
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: object, session: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """As `horovodish.allgather_object`. `session` is Horovod's; none is needed, so it has no meaning here."""
    return objects.allgather_object(obj, name, process_set)


def _checked_alike(variables: list[Any], root_rank: int, process_set: ProcessSet) -> str:
    """A name for the broadcast of the variables, once it is clear that all ranks have the same ones."""
    identity = checked_id(process_set)
    if not tf.executing_eagerly():
        checked_root(root_rank, process_set)
        return operation_name("broadcast_variables", None, identity)
    with compared_on_all_ranks("broadcast_variables", "the variables", process_set) as described:
        checked_root(root_rank, process_set)
        for number, variable in enumerate(variables):
            dtype = tf.as_dtype(variable.dtype).name
            kind = f"number {number} of shape {tuple(variable.shape)} and dtype {dtype}"
            described.append(Named(kind, name_of(variable)))
    return generated_name("broadcast_variables", identity)
