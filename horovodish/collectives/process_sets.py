"""Process sets: groups of ranks that reduce among themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from horovodish import _native
from horovodish.collectives.submission import RefuseOnError, gather_objects, generated_name
from horovodish.errors import MismatchError
from horovodish.mpi import binding
from horovodish.runtime import basics

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
        self.ranks: list[int] = []
        self.listed_ranks = ""
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
            self.ranks = sorted(given)
        self.process_set_id: int | None = None
        self.mpi_comm: Intracomm | None = None
        self._engine_comm: Intracomm | None = None

    def size(self) -> int:
        """How many ranks it has.

        Raises:
            ValueError: it is not added. So do the other methods.
        """
        self._check_added()
        return len(self.ranks)

    def rank(self) -> int:
        """The number of this rank within the set.

        Raises:
            ValueError: this rank is outside it.
        """
        checked_id(self)
        return self.ranks.index(basics.rank())

    def included(self) -> bool:
        """Whether this rank is one of its ranks."""
        self._check_added()
        return basics.rank() in self.ranks

    def __reduce__(self) -> tuple[Callable[[list[int] | None], ProcessSet], tuple[list[int] | None]]:
        # A set is what has been added, and a copy of it would not be: copies of what holds it, such as a model's layer,
        # hold the same set.
        return _set_of, (None if self is global_process_set else self.ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks}, process_set_id={self.process_set_id})"

    def _number(self) -> None:
        """Find out the ranks anew, because another `init()` may number them otherwise."""
        if self._group is not None:
            self.ranks = _ranks_of(self._group)

    def _check_added(self) -> None:
        basics.running()
        if _added.get(self.process_set_id) is not self:
            raise ValueError(
                f"the process set of ranks {self.ranks} is not in use: add it with hvd.add_process_set(...) or "
                "hvd.init(process_sets=[...]), once after each init()"
            )


global_process_set = ProcessSet([0])
"""All ranks: the set that every collective takes when none is given."""


def _set_of(ranks: list[int] | None) -> ProcessSet:
    """The set of these ranks that is in use; all ranks for None; otherwise one that is yet to be added."""
    if ranks is None:
        return global_process_set
    return next((added for added in _added.values() if added.ranks == ranks), None) or ProcessSet(ranks)


_added: dict[int | None, ProcessSet] = {}
_regions: dict[int, int] = {}  # of shared memory, by id
_next_id = 1


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
    global _next_id
    running = basics.running()
    agreement = generated_name("add_process_set")
    with RefuseOnError("allgather", agreement, _GLOBAL_ID):
        added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        added._number()
    _check_agreement("add_process_set", added.ranks, agreement)
    if added.ranks[-1] >= running.topology.size or added.ranks[0] < 0:
        raise ValueError(f"process set {added.ranks}: the ranks are 0 to {running.topology.size - 1}")
    if any(other.ranks == added.ranks for other in _added.values()):
        raise ValueError(f"a process set of ranks {added.ranks} is in use already; use that one")
    free = set(range(1, _native.REGIONS)) - set(_regions.values())
    if not free:
        raise ValueError(f"{_native.REGIONS} process sets are in use; remove one with hvd.remove_process_set(...)")
    region = min(free)
    running.engine.clear_region(region)
    if basics.rank() in added.ranks and running.communicator is not None:
        world = running.communicator.Get_group()
        group = world.Incl(added.ranks)
        added.mpi_comm = running.communicator.Create_group(group)
        group.Free()
        world.Free()
        added._engine_comm = binding.private(added.mpi_comm)
    gather_objects(None, generated_name("add_process_set.cleared"), _GLOBAL_ID)
    if basics.rank() in added.ranks:
        running.add_process_set(_next_id, added.ranks, region, added._engine_comm, 0)
    gather_objects(None, generated_name("add_process_set.added"), _GLOBAL_ID)
    added.listed_ranks = ",".join(map(str, added.ranks))
    added.process_set_id = _next_id
    _added[_next_id] = added
    _regions[_next_id] = region
    _next_id += 1
    return added


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
    identity = process_set.process_set_id
    _check_agreement("remove_process_set", identity, agreement)
    if identity == _GLOBAL_ID or _added.get(identity) is not process_set or identity is None:
        return False
    busy = gather_objects(
        basics.engine().process_set_busy(identity), generated_name("remove_process_set.busy"), _GLOBAL_ID
    )
    busy_ranks = [rank for rank, is_busy in busy.items() if is_busy]
    if busy_ranks:
        raise ValueError(
            f"process set {identity} has operations under way on rank {busy_ranks[0]}. Remedy: synchronize them on "
            "every rank before the set is removed."
        )
    if process_set.included():
        basics.engine().remove_process_set(identity)
    gather_objects(None, generated_name("remove_process_set.removed"), _GLOBAL_ID)
    for comm in (process_set.mpi_comm, process_set._engine_comm):
        if comm is not None:
            comm.Free()
    _forget(process_set)
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
    if not process_set.included():
        raise ValueError(
            f"rank {basics.rank()} is not in process set {process_set.process_set_id} of ranks {process_set.ranks}. "
            "Make the call on those ranks only: if process_set.included(): ..."
        )
    assert process_set.process_set_id is not None
    return process_set.process_set_id


def added(process_set_id: int) -> ProcessSet:
    """The set of this number, which is in use."""
    return _added[process_set_id]


def _check_wanted(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'init(process_sets={process_sets!r}): give a list of process sets, or "dynamic"')


def _start(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    running = basics.running()
    global_process_set.ranks = list(range(running.topology.size))
    global_process_set.process_set_id = _GLOBAL_ID
    global_process_set.mpi_comm = running.communicator
    _added[_GLOBAL_ID] = global_process_set
    for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(process_set)


def _stop() -> None:
    global _next_id
    for process_set in list(_added.values()):
        _forget(process_set)
    _next_id = 1


def _forget(process_set: ProcessSet) -> None:
    assert process_set.process_set_id is not None
    del _added[process_set.process_set_id]
    _regions.pop(process_set.process_set_id, None)
    process_set.process_set_id = None
    process_set.mpi_comm = process_set._engine_comm = None


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
