"""What must be the same on every rank, compared before anything hangs on it."""

from __future__ import annotations

from typing import Any

from horovodish.collectives import allgather_object
from horovodish.errors import MismatchError
from horovodish.process_sets import ProcessSet, global_process_set

__all__ = ["require_agreement"]


def require_agreement(what: str, value: list[Any], process_set: ProcessSet = global_process_set) -> None:
    """Raise the same error on every rank when `value` is not the same on all of them. Collective; blocks.

    Args:
        what: what the value is, for the message.
        value: items that can be pickled and compared.
        process_set: the ranks that compare.

    Raises:
        MismatchError: the values differ; the message shows what only one of two ranks has.

    Example:
        >>> require_agreement("broadcast_parameters: the names of the tensors", sorted(tensors))
    """
    values = allgather_object(value, process_set=process_set)
    for rank, other in zip(process_set.ranks, values, strict=False):  # ranks that have joined give none
        if other != values[0]:
            difference = _difference(values[0], other, process_set.ranks[0], rank)
            raise MismatchError(f"{what} differ: {difference}; build them alike on every rank")


def _difference(first: list[Any], other: list[Any], first_rank: int, rank: int) -> str:
    only_first = [item for item in first if item not in other]
    only_other = [item for item in other if item not in first]
    return f"only rank {first_rank} has {_shortened(only_first)}, only rank {rank} has {_shortened(only_other)}"


def _shortened(items: list[Any]) -> str:
    shown = ", ".join(map(str, items[:5])) or "nothing"
    return shown + (f" and {len(items) - 5} more" if len(items) > 5 else "")
