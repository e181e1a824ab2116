"""What must be the same on every rank, compared before anything hangs on it."""

from __future__ import annotations

from typing import Any

from horovodish.errors import MismatchError
from horovodish.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.submission import gather_objects, generated_name

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
    identity = checked_id(process_set)
    values = gather_objects(value, generated_name("agreement", identity), identity)
    first = min(values)
    for place, other in values.items():
        if other != values[first]:
            difference = _difference(values[first], other, process_set.ranks[first], process_set.ranks[place])
            raise MismatchError(f"{what} differ: {difference}; build them alike on every rank")


def _difference(first: list[Any], other: list[Any], first_rank: int, rank: int) -> str:
    only_first = [item for item in first if item not in other]
    only_other = [item for item in other if item not in first]
    return f"only rank {first_rank} has {_shortened(only_first)}, only rank {rank} has {_shortened(only_other)}"


def _shortened(items: list[Any]) -> str:
    shown = ", ".join(map(str, items[:5])) or "nothing"
    return shown + (f" and {len(items) - 5} more" if len(items) > 5 else "")
