"""The values of one rank, given to all: of parameters, or of the state of an optimizer, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovodish.collectives.adapter import Adapter, checked_root
from horovodish.collectives.comparison import SAME_MODEL, compared_on_all_ranks
from horovodish.collectives.objects import broadcast_object
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, global_process_set

__all__ = ["broadcast_named"]


def broadcast_named(
    function: str,
    values: Mapping[str, Any],
    root_rank: int,
    adapter: Adapter[Any],
    process_set: ProcessSet = global_process_set,
) -> dict[str, Any]:
    """Give every rank of a process set the root's values. Collective; blocks.

    Args:
        function: that the user has called, for the names of the operations and for messages.
        values: tensors of the framework, and anything else that can be pickled, by names that are the same on every
            rank, in any order. Tensors have the same shapes and dtypes on every rank.
        root_rank: the rank whose values to send, counted among all ranks, the same on every rank.
        adapter: of the framework's tensors.
        process_set: the ranks that take part.

    Returns:
        The root's values: new tensors and objects, by the same names.

    Raises:
        MismatchError: the names, dtypes or shapes differ. Every rank raises it.
        ValueError: there is no rank `root_rank` in the process set.
        See `horovodish.collectives` for the errors of every operation.
    """
    with compared_on_all_ranks(function, "the parameters", process_set, SAME_MODEL) as described:
        root = checked_root(root_rank, process_set)
        ordered = {name: values[name] for name in sorted(values)}
        tensors = {name: value for name, value in ordered.items() if hasattr(value, "shape")}
        described += [
            f"{name} of shape {tuple(tensors[name].shape)}" if name in tensors else f"{name}, which is not a tensor"
            for name in ordered
        ]
    handles = {
        name: adapter.one(Operation("broadcast", f"{function}.{name}", process_set, root_rank=root), tensor)
        for name, tensor in tensors.items()
    }
    others = {name: value for name, value in ordered.items() if name not in tensors}
    if others:
        others = broadcast_object(others, root, f"{function}.others", process_set)
    return {**others, **{name: handle.wait() for name, handle in handles.items()}}
