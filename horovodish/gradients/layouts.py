"""Which gradients are dense, sparse or absent on some rank, and whether the ranks have the same parameters.

The ranks compare both in one allreduce, which they wait for. `Compared` remembers what they found, so eager steps
compare in the first reductions and once more after a gradient has come that no rank had before. In between a rank says
of each gradient with its bucket whether it is absent (`at_once.py`), and a sparse one of a dense bucket is made dense.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.comparison import SAME_MODEL, difference
from horovodish.collectives.consistency import Checksums, are_equal, details, summands, warn_of_difference
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.reduce_ops import Sum
from horovodish.collectives.submission import Handle, gather_objects
from horovodish.errors import MismatchError
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["Compared", "Comparison", "Layout", "compare_layouts", "compared", "warn_of"]


class Layout(IntEnum):
    """What a rank has of a gradient. The sum over the ranks says whether any of them has a sparse or a dense one."""

    ABSENT = 0
    DENSE = 1
    SPARSE = 2**16  # more than the dense ones of 32768 ranks add up to; `summands()` has the same limit


class Comparison(NamedTuple):
    """What ranks have found out of each other's gradients and parameters.

    Attributes:
        layouts: for each gradient, SPARSE if any rank has a sparse one, DENSE if any has a dense one, else ABSENT.
        ranks: how many have taken part, without those that have joined.
        differs: whether all ranks of the process set have given checksums, and these were not equal.
    """

    layouts: list[Layout]
    ranks: int
    differs: bool


def compare_layouts(
    layouts: Sequence[Layout], gradients: str, process_set: ProcessSet, checksums: Checksums | None = None
) -> Handle[Comparison]:
    """Find out which layouts the gradients have on any rank. Collective; does not block.

    Args:
        layouts: of this rank's gradients; as many on every rank.
        gradients: what they are called, the same on every rank.
        process_set: the ranks that compare.
        checksums: of what ought to be equal on the ranks, if this rank gives them. Other ranks may not.
    """
    given = [0] * 5 if checksums is None else [1, *summands(checksums)]

    def result(sums: Sequence[Any], _: object) -> Comparison:
        numbers = sums[0].tolist()
        totals, (ranks, gave, *summed) = numbers[: len(layouts)], numbers[len(layouts) :]
        found = [Layout.SPARSE if total >= Layout.SPARSE else Layout(min(total, 1)) for total in totals]
        return Comparison(found, ranks, gave == process_set.size() and not are_equal(summed, gave))

    name = f"{gradients}, which the ranks compare first"
    own = np.array([*layouts, 1, *given], np.int64)
    return ARRAYS.start(Operation("allreduce", name, process_set, Sum), [own], result)


def compared(
    comparison: Handle[Comparison], names: Sequence[str], gradients: str, process_set: ProcessSet
) -> Comparison:
    """What the ranks have found out. Collective; blocks.

    Args:
        comparison: what `compare_layouts` gives.
        names: of the gradients, for the message; a parameter may have another name on each rank.
        gradients, process_set: as for `compare_layouts`.

    Raises:
        MismatchError: the ranks have different numbers of gradients. Every rank raises it.
    """
    try:
        return comparison.wait()
    except MismatchError:  # on every rank
        of_places = gather_objects([*names], f"{gradients}: names of the parameters", checked_id(process_set))
        ranks, (first, *others) = process_set.ranks, of_places
        ours = of_places[first]
        for place in others:
            if len(theirs := of_places[place]) != len(ours):
                raise MismatchError(
                    f"the ranks' models differ: rank {ranks[first]} trains {len(ours)} parameters, rank "
                    f"{ranks[place]} trains {len(theirs)}: {difference(ours, theirs, ranks[first], ranks[place])}. "
                    f"Remedy: {SAME_MODEL}"
                ) from None
        raise


def warn_of(comparison: Comparison, checksums: Checksums, gradients: str, process_set: ProcessSet, remedy: str) -> None:
    """Warn if the ranks have found that their parameters differ. Collective; blocks.

    Args:
        comparison: its `differs` is the same on every rank.
        checksums: of this rank.
        gradients, process_set: as for `compare_layouts`.
        remedy: what to do about it.
    """
    if comparison.differs:
        warn_of_difference(details(checksums, gradients, process_set).wait(), process_set, remedy)


class Compared:
    """What a rank has found out of gradients that are reduced eagerly.

    Attributes:
        layouts: of the gradients, by what tells these from others. Only what all ranks of the process set have heard is
            in here, so it is the same on each of them.
    """

    def __init__(self) -> None:
        self.layouts: dict[Hashable, list[Layout]] = {}


basics.follow(stopped=lambda: part(Compared).layouts.clear())
