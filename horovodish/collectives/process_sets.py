"""Process sets: groups of ranks that reduce among themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovodish import _native
from horovodish.collectives.submission import RefuseOnError, gather_objects, generated_name
from horovodish.errors import MismatchError
from horovodish.mpi import binding
from horovodish.runtime import basics
from horovodish.runtime.process import part

if TYPE_CHECKING:
    from mpi4py.MPI import Group, Intracomm

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

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
    """Some of the ranks. Collectives with `process_set=` take place among them, apart from those of other sets.

    A set is used once `init(process_sets=[...])` or `add_process_set` has added it.

    Args:
        ranks_or_comm: the ranks, in any order, or an `mpi4py` communicator of exactly these ranks. It may be freed.

    Attributes:
        process_set_id: its number, the same on every rank; 0 is all ranks, None means that it is not added.
        ranks: of the world, in ascending order. Those of a communicator are numbered as `init()` has numbered them, and
            there are none before it.
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
                self._number()
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
        added = self._added()
        return added.ranks if added else self._ranks

    @property
    def process_set_id(self) -> int | None:
        added = self._added()
        return added.number if added else None

    @property
    def listed_ranks(self) -> str:
        added = self._added()
        return added.listed_ranks if added else ""

    @property
    def mpi_comm(self) -> Intracomm | None:
        added = self._added()
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

    def _number(self) -> None:
        """Find out the ranks anew, because another `init()` may number them otherwise."""
        if self._group is not None:
            self._ranks = _ranks_of(self._group)

    def _added(self) -> _Added | None:
        return part(_Sets).added.get(self)

    def _checked(self) -> _Added:
        basics.running()
        added = self._added()
        if added is None:
            raise ValueError(
                f"the process set of ranks {self._ranks} is not in use: add it with hvd.add_process_set(...) or "
                "hvd.init(process_sets=[...]), once after each init()"
            )
        return added


@dataclass
class _Added:
    """A process set that is in use.

    Attributes:
        number, ranks, listed_ranks, mpi_comm: of the set, as its attributes say.
        region: of shared memory; 0 is the global set's.
        engine_comm: what the engine uses in place of `mpi_comm`.
    """

    number: int
    ranks: list[int]
    listed_ranks: str = ""
    mpi_comm: Intracomm | None = None
    region: int = 0
    engine_comm: Intracomm | None = None


@dataclass
class _Sets:
    """The process sets that this rank uses.

    Attributes:
        added: by the object that the user has.
        next_number: of the set that is added next.
    """

    added: dict[ProcessSet, _Added] = field(default_factory=dict)
    next_number: int = 1


global_process_set = ProcessSet([0])
"""All ranks: the set that every collective takes when none is given."""


def _set_of(ranks: list[int] | None) -> ProcessSet:
    """The set of these ranks that is in use; all ranks for None; otherwise one that is yet to be added."""
    if ranks is None:
        return global_process_set
    return next((each for each, added in part(_Sets).added.items() if added.ranks == ranks), None) or ProcessSet(ranks)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Begin to use a process set. Every rank of the world must call it, with the same ranks; blocks.

    Args:
        process_set: the set, or its ranks.

    Returns:
        The set, with its `process_set_id`.

    Raises:
        ValueError: a rank that does not exist, a set that is in use, or too many sets at once.
        MismatchError: the ranks name different sets, or a rank has joined, and every rank that has not raises it; or
            another rank raised ValueError.

    Example:
        >>> first_half = hvd.add_process_set(range(hvd.size() // 2))
    """
    running, sets = basics.running(), part(_Sets)
    agreement = generated_name("add_process_set")
    with RefuseOnError("allgather", agreement, _GLOBAL_ID):
        wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        wanted._number()
    ranks = wanted.ranks
    _check_agreement("add_process_set", ranks, agreement)
    if ranks[-1] >= running.topology.size or ranks[0] < 0:
        raise ValueError(f"process set {ranks}: the ranks are 0 to {running.topology.size - 1}")
    if any(other.ranks == ranks for other in sets.added.values()):
        raise ValueError(f"a process set of ranks {ranks} is in use already; use that one")
    free = set(range(_native.REGIONS)) - {other.region for other in sets.added.values()}
    if not free:
        raise ValueError(f"{_native.REGIONS} process sets are in use; remove one with hvd.remove_process_set(...)")
    added = _Added(sets.next_number, ranks, ",".join(map(str, ranks)), region=min(free))
    running.engine.clear_region(added.region)
    if basics.rank() in ranks and running.communicator is not None:
        world = running.communicator.Get_group()
        group = world.Incl(ranks)
        added.mpi_comm = running.communicator.Create_group(group)
        group.Free()
        world.Free()
        added.engine_comm = binding.private(added.mpi_comm)
    gather_objects(None, generated_name("add_process_set.cleared"), _GLOBAL_ID)
    if basics.rank() in ranks:
        running.add_process_set(added.number, ranks, added.region, added.engine_comm, 0)
    gather_objects(None, generated_name("add_process_set.added"), _GLOBAL_ID)
    sets.added[wanted] = added
    sets.next_number += 1
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Stop using a process set. Every rank of the world must call it, when nothing is under way in the set; blocks.

    Args:
        process_set: what `add_process_set` gave.

    Returns:
        True if it was removed, False if it is the global set or not in use.

    Raises:
        MismatchError: the ranks name different sets, or a rank has joined; every rank that has not raises it.
        TypeError: it is no `ProcessSet`; the other ranks raise MismatchError.
        ValueError: operations are under way in the set on some rank; every rank raises it, and the set stays.
    """
    agreement = generated_name("remove_process_set")
    with RefuseOnError("allgather", agreement, _GLOBAL_ID):
        check_kind(process_set)
    sets, added = part(_Sets), process_set._added()
    identity = process_set.process_set_id
    _check_agreement("remove_process_set", identity, agreement)
    if added is None or added.number == _GLOBAL_ID:
        return False
    busy = gather_objects(
        basics.engine().process_set_busy(added.number), generated_name("remove_process_set.busy"), _GLOBAL_ID
    )
    busy_ranks = [rank for rank, is_busy in busy.items() if is_busy]
    if busy_ranks:
        raise ValueError(
            f"process set {identity} has operations under way on rank {busy_ranks[0]}. Remedy: synchronize them on "
            "every rank before the set is removed."
        )
    if process_set.included():
        basics.engine().remove_process_set(added.number)
    gather_objects(None, generated_name("remove_process_set.removed"), _GLOBAL_ID)
    for comm in (added.mpi_comm, added.engine_comm):
        if comm is not None:
            comm.Free()
    del sets.added[process_set]
    return True


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
    for process_set, each in part(_Sets).added.items():
        if each.number == number:
            return process_set
    raise KeyError(number)


def _check_wanted(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'init(process_sets={process_sets!r}): give a list of process sets, or "dynamic"')


def _start(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    running = basics.running()
    everyone = _Added(_GLOBAL_ID, list(range(running.topology.size)), mpi_comm=running.communicator)
    part(_Sets).added[global_process_set] = everyone
    for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(process_set)


def _stop() -> None:
    sets = part(_Sets)
    sets.added.clear()
    sets.next_number = 1


def _check_agreement(call: str, value: object, name: str) -> None:
    seen = gather_objects(value, name, _GLOBAL_ID)
    joined = [str(rank) for rank in range(basics.size()) if rank not in seen]
    if joined:
        them = f"rank {joined[0]} has" if len(joined) == 1 else f"ranks {', '.join(joined)} have"
        raise MismatchError(
            f"{call}: {them} joined and cannot take part. Remedy: add and remove process sets before any rank calls "
            "join(), or after join() has returned."
        )
    different = next((rank for rank, theirs in seen.items() if theirs != seen[0]), None)
    if different is not None:
        raise MismatchError(
            f"{call}: rank 0 names {seen[0]}, rank {different} names {seen[different]}. Remedy: every rank must make "
            "the same calls in the same order, also the ranks outside the set."
        )


basics.follow(check=_check_wanted, started=_start, stopped=_stop)
