"""Process sets: groups of ranks that reduce among themselves. `adding_sets` puts them into use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovodish.mpi import binding
from horovodish.runtime import basics
from horovodish.runtime.process import part

if TYPE_CHECKING:
    from mpi4py.MPI import Group, Intracomm

__all__ = ["ProcessSet", "global_process_set"]

_GLOBAL_ID = 0


def _ranks_of(group: Group) -> list[int]:
    """The ranks of `init()` that a group of MPI's processes consists of.

    Raises:
        ValueError: one of the processes is none.
    """
    library = binding.load()
    world = (basics.running().communicator or library.COMM_WORLD).Get_group()
    ranks: list[int] = list(group.Translate_ranks(list(range(group.Get_size())), world))
    world.Free()
    if library.UNDEFINED in ranks:
        raise ValueError(
            f"rank {ranks.index(library.UNDEFINED)} of the communicator of a process set is not among the ranks that "
            "have called init() together; pass a communicator of those only"
        )
    return sorted(ranks)


class ProcessSet:
    """Some of the ranks. Collectives with `process_set=` run among them, independently of other sets.

    A set is used once `init(process_sets=[...])` or `add_process_set` has added it.

    Args:
        ranks_or_comm: the ranks, in any order, or an `mpi4py` communicator of exactly these ranks. It may be freed.

    Attributes:
        process_set_id: its number, the same on every rank; 0 is all ranks, None means that it is not added.
        ranks: of the world, in ascending order. With a communicator, `init()` numbers its ranks; before `init()` the
            list is empty.
        listed_ranks: these ranks as a text such as "0,2", made when the set is added, because operations need it often.
        mpi_comm: an `mpi4py` communicator of its own, on its ranks and under MPI only; otherwise None.

    Raises:
        ValueError: no rank, or a rank more than once, or a communicator with a rank that `init()` does not know, or
            something that is neither ranks nor a communicator.

    Example:
        >>> even = hvd.add_process_set(range(0, hvd.size(), 2))
        >>> if even.included():
        ...     total = hvd.allreduce(values, op=hvd.Sum, process_set=even)
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Intracomm):
        self._group: Group | None = None
        self._ranks: list[int] = []
        if hasattr(ranks_or_comm, "Get_group"):
            self._group = ranks_or_comm.Get_group()
            if basics.is_initialized():
                number(self)
        else:
            try:
                given = [operator.index(rank) for rank in ranks_or_comm]
            except TypeError:
                raise ValueError(f"a process set needs ranks such as [0, 1], not {ranks_or_comm!r}") from None
            if not given or len(set(given)) < len(given):
                raise ValueError(f"a process set needs at least one rank and each at most once, not {given}")
            self._ranks = sorted(given)

    @property
    def ranks(self) -> list[int]:
        added = self._record()
        return added.ranks if added else self._ranks

    @property
    def process_set_id(self) -> int | None:
        added = self._record()
        return added.number if added else None

    @property
    def listed_ranks(self) -> str:
        added = self._record()
        return added.listed_ranks if added else ""

    @property
    def mpi_comm(self) -> Intracomm | None:
        added = self._record()
        return added.mpi_comm if added else None

    def size(self) -> int:
        """How many ranks it has.

        Raises:
            ValueError: it is not added. So do the other methods.
        """
        return len(self._checked().ranks)

    def rank(self) -> int:
        """The number of this rank within the set.

        Raises:
            ValueError: this rank is outside it.
        """
        checked_id(self)
        return self.ranks.index(basics.rank())

    def included(self) -> bool:
        """Whether this rank is one of its ranks."""
        return basics.rank() in self._checked().ranks

    def __reduce__(self) -> tuple[Callable[[list[int] | None], ProcessSet], tuple[list[int] | None]]:
        # A set is what has been added, and a copy of it would not be: copies of what holds it, such as a model's layer,
        # hold the same set.
        return _set_of, (None if self is global_process_set else self.ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks}, process_set_id={self.process_set_id})"

    def _record(self) -> InUse | None:
        return part(Sets).in_use.get(self)

    def _checked(self) -> InUse:
        basics.running()
        added = self._record()
        if added is None:
            raise ValueError(
                f"the process set of ranks {self._ranks} is not in use: add it with hvd.add_process_set(...) or "
                "hvd.init(process_sets=[...]), once after each init()"
            )
        return added


def number(process_set: ProcessSet) -> None:
    """Find out the ranks of a set again, because each `init()` may number the ranks of a communicator differently."""
    if process_set._group is not None:
        process_set._ranks = _ranks_of(process_set._group)


@dataclass
class InUse:
    """A process set that is in use.

    Attributes:
        number, ranks, listed_ranks, mpi_comm: of the set, as its attributes say.
        region: of shared memory; 0 is the global set's.
        engine_comm: the engine's own communicator in place of `mpi_comm`.
        of_members: only its members know it.
        joins: a rank that calls `join()` joins it. Every member has it until the engine ends or all remove it together.
    """

    number: int
    ranks: list[int]
    listed_ranks: str = ""
    mpi_comm: Intracomm | None = None
    region: int = 0
    engine_comm: Intracomm | None = None
    of_members: bool = False
    joins: bool = True


@dataclass
class Sets:
    """The process sets that this rank uses.

    Attributes:
        in_use: by the object that the user has.
        next_number: the number of the next set that all ranks add.
        next_of_members: counts the sets that only their members know and that have this rank as their first.
        lost_regions: regions of sets that a member has not ended.
    """

    in_use: dict[ProcessSet, InUse] = field(default_factory=dict)
    next_number: int = 1
    next_of_members: int = 0
    lost_regions: set[int] = field(default_factory=set)

    def used_regions(self) -> list[int]:
        """The regions of shared memory that no other set may use."""
        return sorted({each.region for each in self.in_use.values()} | self.lost_regions)

    def of_all_ranks(self) -> dict[ProcessSet, InUse]:
        """The sets that every rank of the world has added."""
        return {process_set: each for process_set, each in self.in_use.items() if not each.of_members}

    def that_join(self) -> list[ProcessSet]:
        """The sets that this rank joins when it calls `join()`; the global one comes first."""
        own = basics.rank()
        return [process_set for process_set, each in self.in_use.items() if each.joins and own in each.ranks]


global_process_set = ProcessSet([0])
"""All ranks: the set that every collective takes when none is given."""


def _set_of(ranks: list[int] | None) -> ProcessSet:
    """The set of these ranks that is in use; all ranks for None; otherwise one that is yet to be added."""
    if ranks is None:
        return global_process_set
    known = part(Sets).of_all_ranks().items()
    return next((each for each, added in known if added.ranks == ranks), None) or ProcessSet(ranks)


def check_kind(process_set: object) -> None:
    """Raise unless this is a process set, in use or not.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set must be a ProcessSet, such as add_process_set([0, 1]) gives, not {type(process_set).__name__}"
        )


def checked_id(process_set: ProcessSet) -> int:
    """The id of a set that is in use and contains this rank.

    Raises:
        ValueError: it is not in use, or this rank is outside it.
        TypeError: it is no process set.
        NotInitializedError: before `init()`.
    """
    if process_set is global_process_set:
        return _GLOBAL_ID
    check_kind(process_set)
    added = process_set._checked()
    if basics.rank() not in added.ranks:
        raise ValueError(
            f"rank {basics.rank()} is not in process set {added.number} of ranks {added.ranks}. "
            "Make the call on those ranks only: if process_set.included(): ..."
        )
    return added.number


def added(number: int) -> ProcessSet:
    """The set of this number, which is in use.

    Raises:
        KeyError: none is.
    """
    for process_set, each in part(Sets).in_use.items():
        if each.number == number:
            return process_set
    raise KeyError(number)


def _start(_: object) -> None:
    running = basics.running()
    everyone = InUse(_GLOBAL_ID, list(range(running.topology.size)), mpi_comm=running.communicator)
    part(Sets).in_use[global_process_set] = everyone


def _stop() -> None:
    sets = part(Sets)
    sets.in_use.clear()
    sets.next_number, sets.next_of_members = 1, 0
    sets.lost_regions.clear()


basics.follow(started=_start, stopped=_stop)
