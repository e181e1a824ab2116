"""Compares values that must be the same on every rank, before a difference makes ranks hang."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.submission import RefuseOnError, gather_objects, generated_name
from horovodish.errors import MismatchError

__all__ = ["SAME_MODEL", "Named", "compared_on_all_ranks", "difference"]

SAME_MODEL = "build the same model on every rank"


@contextmanager
def compared_on_all_ranks(
    function: str,
    what: str,
    process_set: ProcessSet = global_process_set,
    remedy: str = "build them alike on every rank",
) -> Iterator[list[Any]]:
    """Wraps the checks of a collective function, at whose end the ranks compare what they have. Collective; blocks.

    Args:
        function: that the user has called, for the messages.
        what: is compared, in the plural, likewise.
        process_set: the ranks that compare.
        remedy: what users can do.

    Yields:
        A list, to be filled with items that can be pickled and compared.

    Raises:
        MismatchError: the lists differ; the message shows what only one of two ranks has. Or another rank has raised
            within: then it is its text. Every rank of the process set raises it.

    Example:
        >>> with compared_on_all_ranks("broadcast_parameters", "the names of the tensors") as names:
        ...     root = checked_root(root_rank)
        ...     names += sorted(tensors)
    """
    identity = checked_id(process_set)
    name = generated_name(function, identity)
    items: list[Any] = []
    with RefuseOnError("allgather", name, identity):
        yield items
    values = gather_objects(items, name, identity)
    first = min(values)
    for place, other in values.items():
        if other != values[first]:
            found = difference(values[first], other, process_set.ranks[first], process_set.ranks[place])
            raise MismatchError(f"{function}: {what} differ: {found}; {remedy}")


@dataclass(frozen=True)
class Named:
    """An item that is compared without its name, because the name may differ between ranks.

    Attributes:
        kind: what kind of item it is.
        name: for the message.
    """

    kind: str
    name: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.name}, {self.kind}"


def difference(first: list[Any], other: list[Any], first_rank: int, rank: int) -> str:
    """The difference between two ranks: a kind differs, only one rank has an item, or the order. Not collective.

    Args:
        first, other: the items of the two ranks, which are not equal.
        first_rank, rank: the two ranks.
    """
    only = {
        first_rank: [item for item in first if item not in other],
        rank: [item for item in other if item not in first],
    }
    ours, theirs = (dict(map(_name_and_kind, items)) for items in only.values())
    both = [name for name in ours if name in theirs]
    alone = {number: [item for item in items if _name_and_kind(item)[0] not in both] for number, items in only.items()}
    found = ", ".join(f"only rank {number} has {_shortened(items)}" for number, items in alone.items() if items)
    if both:
        name, count = both[0], len(both) - 1
        more = f", and {count} more differ" if count else ""
        found = "; " * bool(found) + found
        return f"{name} is {ours[name]} on rank {first_rank} and {theirs[name]} on rank {rank}{more}{found}"
    if found:
        return found
    pairs = itertools.zip_longest(first, other, fillvalue="nothing")
    place, (one, another) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"at place {place}, rank {first_rank} has {one} and rank {rank} has {another}"


def _name_and_kind(item: Any) -> tuple[str, str]:
    """Split "layer.weight of shape (3,)" into "layer.weight" and "of shape (3,)"."""
    if isinstance(item, Named):
        return item.name, item.kind
    name, of, kind = str(item).partition(" of ")
    return name, (of + kind).strip()


def _shortened(items: list[Any]) -> str:
    shown = ", ".join(map(str, items[:5]))
    return shown + (f" and {len(items) - 5} more" if len(items) > 5 else "")
