"""Python objects of one rank, or of all ranks, on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from horovodish.collectives.adapter import checked_root
from horovodish.collectives.functions import allreduce, broadcast
from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.reduce_ops import Sum
from horovodish.collectives.submission import RefuseOnError, gather_objects, generated_name, pickled
from horovodish.runtime import basics

__all__ = ["allgather_object", "broadcast_object"]

T = TypeVar("T")


def broadcast_object(
    obj: object, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send an object of one rank, the root, to every rank. Collective; blocks.

    Args:
        obj: on the root, any object that pickle can write. If cloudpickle is installed, also lambdas, and functions and
            classes that are defined within a function. Ignored on the other ranks.
        root_rank: the root, the same on every rank.
        name: the operation's name, the same on every rank. Without it, the call is numbered.
        process_set: the ranks that take part.

    Returns:
        On the root `obj` itself, on the other ranks a copy of it.

    Raises:
        ValueError: there is no rank `root_rank` in the process set.
        Exception: the exception of pickle or cloudpickle, on a rank that cannot write or read the object, for example
            because it lacks a module. The other ranks raise MismatchError with the same text.
        See `horovodish.collectives` for the errors of every operation.

    Example:
        >>> start_epoch = hvd.broadcast_object(start_epoch if hvd.rank() == 0 else None)
    """
    identity = checked_id(process_set)
    name = generated_name("broadcast_object", identity) if name is None else name
    with RefuseOnError("broadcast", f"{name}.length", identity):
        root = checked_root(root_rank, process_set)
    if basics.rank() == root:
        data = pickled(obj, "broadcast", f"{name}.length", identity)
        broadcast(np.array(data.size), root, f"{name}.length", process_set)
        broadcast(data, root, f"{name}.data", process_set)
        return _loaded(lambda: obj, name, process_set)
    length = broadcast(np.array(0), root, f"{name}.length", process_set)
    received = broadcast(np.empty(length, np.uint8), root, f"{name}.data", process_set)
    return _loaded(lambda: pickle.loads(received.data), name, process_set)


def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Gather an object from every rank. Every rank gets all objects. Collective; blocks.

    Args:
        obj: as for `broadcast_object`.
        name: the operation's name, the same on every rank. Without it, the call is numbered.
        process_set: the ranks that take part.

    Returns:
        Copies of the objects in the order of the ranks, this rank's own included. Ranks that have joined have none.

    Raises:
        Exception: as `broadcast_object`.
        See `horovodish.collectives` for the errors of every operation.

    Example:
        >>> hvd.allgather_object({"rank": hvd.rank()})  # on 2 ranks
        [{'rank': 0}, {'rank': 1}]
    """
    identity = checked_id(process_set)
    name = generated_name("allgather_object", identity) if name is None else name
    gathered = gather_objects(obj, name, identity, load=bytes)
    return _loaded(lambda: [pickle.loads(data) for data in gathered.values()], name, process_set)


def _loaded(load: Callable[[], T], name: str, process_set: ProcessSet) -> T:
    """The result of `load`, once it has returned on every rank. If it raises on one rank, all ranks get an error."""
    with RefuseOnError("allreduce", f"{name}.loaded", checked_id(process_set)):
        value = load()
    allreduce(np.zeros(1, np.uint8), op=Sum, name=f"{name}.loaded", process_set=process_set)
    return value
