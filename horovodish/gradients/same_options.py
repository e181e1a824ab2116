"""Whether the ranks have wrapped an optimizer with the same options.

Options decide when a rank reduces, what, and under which names. So ranks with different options would wait for
different operations, or mix results of different meanings. Before their first results they compare the options, under a
name that depends on no option.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from horovodish import _native
from horovodish.collectives.codecs import CodecCompressor
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.reduce_ops import ReduceOp
from horovodish.collectives.submission import WAIT_SLICE_SECONDS, Handle, counted, gather_objects_async
from horovodish.errors import MismatchError
from horovodish.gradients.compression import NoneCompressor
from horovodish.gradients.sync import Sync
from horovodish.runtime import basics

__all__ = ["SameOptions", "difference_of_options"]


class SameOptions:
    """The comparison of one optimizer's options, once for each start of the engine.

    Every rank counts its optimizers in the order in which it wraps them. After a new `init()`, it counts them in the
    order in which it first uses them.

    Args:
        values: the options by name.
        process_set: the ranks that compare.
    """

    def __init__(self, values: Mapping[str, Any], process_set: ProcessSet):
        self._values, self._process_set = values, process_set
        self._engine: _native.Engine | None = None
        self._name = ""
        self._handle: Handle[dict[int, dict[str, str]]] | None = None
        self._have_compared = False
        self._problem = ""

    def count(self) -> None:
        """Count the optimizer on this engine, if it is not and this rank reduces with others. Not collective."""
        process_set, engine = self._process_set, basics.engine()
        if self._engine is engine or process_set.process_set_id is None or not process_set.included():
            return
        self._engine, self._handle, self._have_compared, self._problem = engine, None, process_set.size() == 1, ""
        identity = checked_id(process_set)
        self._name = f"optimizer {counted('wrapped optimizers', identity)}"
        if identity:
            self._name += f" of ranks {process_set.ranks}"

    def begin(self, passes: int | None = None) -> None:
        """Begin to compare, unless the ranks have. Collective; does not block.

        Args:
            passes: `backward_passes_per_step`, if that has changed.

        Raises:
            MismatchError: the ranks have found a difference before.
        """
        self.count()
        if self._problem:
            raise MismatchError(self._problem)
        if self._engine is None or self._have_compared or self._handle is not None:
            return
        self._handle = gather_objects_async(self.texts(passes), f"{self._name}: options", checked_id(self._process_set))

    def texts(self, passes: int | None = None) -> dict[str, str]:
        """The options as the ranks compare them. Not collective."""
        values = self._values if passes is None else {**self._values, "backward_passes_per_step": passes}
        return {name: _text(value) for name, value in values.items()}

    def settles_within(self, seconds: float) -> bool:
        """Wait this long at most for a comparison that has begun. Return whether none is under way.

        Raises:
            MismatchError: the options differ. Every rank raises it.
        """
        if self._handle is None:
            return True
        if not self._handle.settles_within(seconds):
            return False
        handle, self._handle = self._handle, None
        of_places, ranks = handle.wait(), self._process_set.ranks
        found = difference_of_options({ranks[place]: options for place, options in of_places.items()})
        if found:
            self._problem = (
                f"{self._name}: the ranks have wrapped it with different options: {found}. Remedy: pass the same "
                "options on every rank"
            )
            raise MismatchError(self._problem)
        self._have_compared = len(of_places) == len(ranks)  # a rank that has joined would not know, and may come back
        return True

    def compare(self) -> None:
        """Compare the options now, unless the ranks have. Collective; blocks.

        Raises:
            MismatchError: they differ. Every rank raises it.
        """
        self.begin()
        self.check()

    def skip(self) -> None:
        """Don't compare on this engine from now on: ranks may not get to a comparison alike."""
        self.count()
        self._have_compared = True

    @property
    def have_compared(self) -> bool:
        """Whether all ranks have compared on this engine."""
        return self._have_compared and self._engine is basics.engine()

    def check(self) -> None:
        """Wait for a comparison that has begun. Collective; blocks.

        Raises:
            MismatchError: the options differ. Every rank raises it.
        """
        while not self.settles_within(WAIT_SLICE_SECONDS):
            pass


def difference_of_options(of_ranks: Mapping[int, Mapping[str, str]]) -> str:
    """The options that differ, with the ranks of each value; empty if none does. Not collective.

    Args:
        of_ranks: the options by rank, and by name.

    Example:
        >>> difference_of_options({0: {"op": "Sum"}, 1: {"op": "Average"}, 2: {"op": "Sum"}})
        'op= is Sum on ranks 0 and 2, and Average on rank 1'
    """
    found = []
    for name in next(iter(of_ranks.values()), {}):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, options in of_ranks.items():
            holders[options[name]].append(rank)
        if len(holders) > 1:
            found.append(f"{name}= is " + ", and ".join(f"{text} on {_ranks(its)}" for text, its in holders.items()))
    return "; ".join(found)


def _ranks(ranks: list[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _text(value: Any) -> str:
    """An option as text that is the same on every rank that has given the same."""
    if isinstance(value, ReduceOp):
        return value.name.capitalize()
    if isinstance(value, ProcessSet):  # each rank may have to pass its own
        return f"a set of {len(value.ranks)} ranks"
    if isinstance(value, Sync):
        within = value.within if isinstance(value.within, str | None) else _text(value.within)
        return _with(value, within=within, compression=value.compression and _text(value.compression))
    if isinstance(value, CodecCompressor):
        return _with(value, start=int(value.start), error_feedback="" if value.error_feedback else "False")
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, bool | str | None):
        return repr(value)
    if isinstance(value, int | float):  # 1 and 1.0 are the same option
        return repr(float(value)).removesuffix(".0")
    if isinstance(shape := getattr(value, "shape", None), tuple):  # the ranks may give names of their own
        return str(tuple(shape))
    if value is NoneCompressor:
        return "Compression.none"
    kind = value if isinstance(value, type) else type(value)
    return kind.__name__


def _with(value: Any, **others: Any) -> str:
    """An object's own text, and what this leaves out of it."""
    return " with ".join([repr(value), *(f"{name}={text}" for name, text in others.items() if text)])
