"""Process sets are put into use and out of it, which takes every rank of the world."""

from __future__ import annotations

from collections.abc import Sequence

from horovodish import _native
from horovodish.collectives.process_sets import InUse, ProcessSet, Sets, check_kind, number
from horovodish.collectives.submission import RefuseOnError, gather_objects, generated_name
from horovodish.errors import MismatchError
from horovodish.mpi import binding
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["add_process_set", "remove_process_set"]

_GLOBAL_ID = 0


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
    running, sets = basics.running(), part(Sets)
    agreement = generated_name("add_process_set")
    with RefuseOnError("allgather", agreement, _GLOBAL_ID):
        wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        number(wanted)
    ranks = wanted.ranks
    _check_agreement("add_process_set", ranks, agreement)
    if ranks[-1] >= running.topology.size or ranks[0] < 0:
        raise ValueError(f"process set {ranks}: the ranks are 0 to {running.topology.size - 1}")
    if any(other.ranks == ranks for other in sets.in_use.values()):
        raise ValueError(f"a process set of ranks {ranks} is in use already; use that one")
    free = set(range(_native.REGIONS)) - {other.region for other in sets.in_use.values()}
    if not free:
        raise ValueError(f"{_native.REGIONS} process sets are in use; remove one with hvd.remove_process_set(...)")
    added = InUse(sets.next_number, ranks, ",".join(map(str, ranks)), region=min(free))
    running.engine.clear_region(added.region)
    if basics.rank() in ranks and running.communicator is not None:
        world = running.communicator.Get_group()
        group = world.Incl(ranks)
        added.mpi_comm = running.communicator.Create_group(group)
        group.Free()
        world.Free()
        added.engine_comm = binding.private(added.mpi_comm)
    # No rank writes to the region before all have cleared it, and no rank submits before all have the set.
    gather_objects(None, generated_name("add_process_set.cleared"), _GLOBAL_ID)
    if basics.rank() in ranks:
        running.add_process_set(added.number, ranks, added.region, added.engine_comm, 0)
    gather_objects(None, generated_name("add_process_set.added"), _GLOBAL_ID)
    sets.in_use[wanted] = added
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
    sets = part(Sets)
    added = sets.in_use.get(process_set)
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
    del sets.in_use[process_set]
    return True


def _check_wanted(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'init(process_sets={process_sets!r}): give a list of process sets, or "dynamic"')


def _start(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(process_set)


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


basics.follow(check=_check_wanted, started=_start)
