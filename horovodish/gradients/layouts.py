"""Which gradients are dense, sparse or absent on some rank, and whether the ranks have the same parameters.

The ranks compare both in one allreduce, which they wait for. `Compared` remembers what they found, so eager steps
compare in the first reductions and once more after a gradient has come that no rank had before. In between a rank says
of each gradient with its bucket whether it is absent (`at_once.py`), and a sparse one of a dense bucket is made dense.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.comparison import SAME_MODEL, Named, difference
from horovodish.collectives.consistency import Checksums, are_equal, details, summands, warn_of_difference
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.reduce_ops import Sum
from horovodish.collectives.submission import Handle, gather_objects
from horovodish.errors import MismatchError
from horovodish.launch.failures import Place
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = [
    "Compared",
    "Comparison",
    "Layout",
    "compare_layouts",
    "compared",
    "difference_of_models",
    "variable",
    "warn_of",
]


class Layout(IntEnum):
    """A rank's kind of a gradient. The sum over the ranks says whether any of them has a sparse or a dense one."""

    ABSENT = 0
    DENSE = 1
    SPARSE = 2**16  # more than the dense ones of 32768 ranks add up to; `summands()` has the same limit


class Comparison(NamedTuple):
    """The result of comparing the ranks' gradients and parameters.

    Attributes:
        layouts: for each gradient, SPARSE if any rank has a sparse one, DENSE if any has a dense one, else ABSENT.
        ranks: how many have taken part, without those that have joined.
        is_one_model: whether these train parameters of the same shapes.
        differs: whether all ranks of the process set have given checksums, and these were not equal.
    """

    layouts: list[Layout]
    ranks: int
    is_one_model: bool
    differs: bool


def compare_layouts(
    layouts: Sequence[Layout],
    gradients: str,
    process_set: ProcessSet,
    checksums: Checksums | None = None,
    shapes: Sequence[str] = (),
    *,
    shown: str = "",
) -> Handle[Comparison]:
    """Find out which layouts the gradients have on any rank. Collective; does not block.

    Args:
        layouts: of this rank's gradients; as many on every rank.
        gradients: what they are called, the same on every rank.
        process_set: the ranks that compare.
        checksums: of what ought to be equal on the ranks, if this rank gives them. Other ranks may not.
        shapes: of the parameters, where the caller knows them. Every rank gives them or none does.
        shown: what messages of this rank call the comparison, such as the name of a parameter.
    """
    given = [0] * 5 if checksums is None else [1, *summands(checksums)]

    def result(sums: Sequence[Any], _: object) -> Comparison:
        numbers = sums[0].tolist()
        totals, (ranks, *rest) = numbers[: len(layouts)], numbers[len(layouts) :]
        of_shapes, (gave, *summed) = rest[:4], rest[4:]
        found = [Layout.SPARSE if total >= Layout.SPARSE else Layout(min(total, 1)) for total in totals]
        differs = gave == process_set.size() and not are_equal(summed, gave)
        return Comparison(found, ranks, are_equal(of_shapes, ranks), differs)

    name = f"{gradients}: layouts"
    own = np.array(
        [*layouts, 1, *summands({str(index): (each, 0) for index, each in enumerate(shapes)}), *given], np.int64
    )
    return ARRAYS.start(
        Operation("allreduce", name, process_set, Sum, member_names=[f"{name}\t{shown}"]), [own], result
    )


def compared(
    comparison: Handle[Comparison],
    names: Sequence[str],
    gradients: str,
    process_set: ProcessSet,
    shapes: Sequence[str] = (),
) -> Comparison:
    """The result of the comparison. Collective; blocks.

    Args:
        comparison: what `compare_layouts` gives.
        names: of the parameters, for the message; a parameter may have another name on each rank.
        gradients, process_set, shapes: as for `compare_layouts`.

    Raises:
        MismatchError: the ranks have different numbers of gradients, or other shapes. Every rank raises it.
    """
    problem = None
    try:
        found = comparison.wait()
    except MismatchError as error:  # on every rank
        problem = error
    else:
        if found.is_one_model:
            return found
    own = [*names], [*shapes]
    of_places = gather_objects(own, f"{gradients}: names of the parameters", checked_id(process_set))
    text = difference_of_models(of_places, process_set)
    raise problem if problem and not text else MismatchError(text) from None


def difference_of_models(of_places: Mapping[int, tuple[list[str], list[str]]], process_set: ProcessSet) -> str:
    """The message about ranks that have built different models; empty if they are the same. Not collective.

    Args:
        of_places: the names and the shapes of the parameters that each rank trains, by its place in the set. The names
            of parameters may differ.
        process_set: the ranks.
    """
    ranks, (first, *others) = process_set.ranks, of_places
    names, shapes = of_places[first]
    for place in others:
        their_names, their_shapes = of_places[place]
        pair = ranks[first], ranks[place]
        if len(names) != len(their_names):
            found = f"rank {pair[0]} trains {len(names)} parameter{'s' * (len(names) > 1)}, "
            found += f"rank {pair[1]} trains {len(their_names)}: "
            found += difference(names, their_names, *pair)
        elif shapes != their_shapes:
            found = difference(_named(names, shapes), _named(their_names, their_shapes), *pair)
        else:
            continue
        return f"the ranks' models differ: {found}. Remedy: {SAME_MODEL}"
    return ""


def variable(index: int, name: str) -> str:
    """The name of a variable in messages. Messages may quote it, so it has no quotes."""
    return f"variable {index} ({name})" if name else f"variable {index}"


def _named(names: Sequence[str], shapes: Sequence[str]) -> list[Named]:
    pairs = enumerate(zip(names, shapes, strict=True))
    return [Named(f"of shape {shape}", variable(index, name)) for index, (name, shape) in pairs]


def warn_of(
    comparison: Comparison,
    checksums: Checksums,
    gradients: str,
    process_set: ProcessSet,
    remedy: str,
    place: Place | None = None,
    step: int = 1,
    once_for: str = "",
) -> None:
    """Warn if the ranks have found that their parameters differ. Collective; blocks.

    Args:
        comparison: its `differs` is the same on every rank.
        checksums: of this rank.
        gradients, process_set: as for `compare_layouts`.
        remedy, place, step: as for `warn_of_difference`.
        once_for: of the comparisons that have this in common, the first one that differs warns. Empty: `gradients`.
    """
    if comparison.differs:
        of_places = details(checksums, f"{gradients}, step {step}", process_set).wait()
        warn_of_difference(of_places, once_for or gradients, process_set, remedy, place, step)


class Compared:
    """A rank's results of comparisons, for gradients that are reduced eagerly.

    Attributes:
        layouts: of the gradients, by what tells these from others. Only what all ranks of the process set have heard is
            in here, so it is the same on each of them.
        kins: of plans that steps make anew and whose options all ranks have compared, with their process sets.
    """

    def __init__(self) -> None:
        self.layouts: dict[Hashable, list[Layout]] = {}
        self.kins: set[Hashable] = set()

    def clear(self) -> None:
        """Forget everything."""
        self.layouts.clear()
        self.kins.clear()


basics.follow(stopped=lambda: part(Compared).clear())
