"""Process sets are put into use and out of it, by every rank of the world or by the members of a set alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from horovodish import _native
from horovodish.collectives.process_sets import InUse, ProcessSet, Sets, check_kind, number
from horovodish.collectives.submission import RefuseOnError, gather_objects, generated_name
from horovodish.errors import HorovodInternalError, MismatchError, StallError
from horovodish.mpi import binding
from horovodish.runtime import basics
from horovodish.runtime.process import part
from horovodish.runtime.starting import Running

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["add_members_set", "add_process_set", "remove_members_set", "remove_process_set"]

_GLOBAL_ID = 0
_TAGS = 1 << 15
"""MPI has at least these for users."""
_FIRST_OF_MEMBERS = 1 << 20
"""Sets that only their members know have numbers from here on."""

_SETTLE_SECONDS, _POLL_SECONDS = 5.0, 0.001
"""For so long the end of such a set waits for calls under way, and then for the other members."""


class Exchange(Protocol):
    """Gives every member's value to every member of a set, in the order of their ranks.

    It raises `StallError` when a member does not come, after `seconds` if these are given.
    """

    def __call__(self, value: Any, seconds: float | None = None) -> list[Any]: ...


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
    used = _check_agreement("add_process_set", ranks, agreement, sets.used_regions())
    if ranks[-1] >= running.topology.size or ranks[0] < 0:
        raise ValueError(f"process set {ranks}: the ranks are 0 to {running.topology.size - 1}")
    if len(ranks) == running.topology.size:
        raise ValueError("a process set of all ranks is in use already; use hvd.global_process_set")
    if any(other.ranks == ranks for other in sets.of_all_ranks().values()):
        raise ValueError(f"a process set of ranks {ranks} is in use already; use that one")
    added = InUse(sets.next_number, ranks, ",".join(map(str, ranks)), region=_free_region(used))
    running.engine.clear_region(added.region)
    if basics.rank() in ranks and running.communicator is not None:
        added.mpi_comm = _communicator(running, added)
        added.engine_comm = binding.private(added.mpi_comm)
    # No rank writes to the region before all have cleared it, and no rank submits before all have the set.
    gather_objects(None, generated_name("add_process_set.cleared"), _GLOBAL_ID)
    if basics.rank() in ranks:
        running.add_process_set(added.number, ranks, added.region, added.engine_comm)
    gather_objects(None, generated_name("add_process_set.added"), _GLOBAL_ID)
    sets.in_use[wanted] = added
    sets.next_number += 1
    return wanted


_before_removal: list[Callable[[ProcessSet], None]] = []


def before_removal(callback: Callable[[ProcessSet], None]) -> None:
    """Have a function called on every rank before a set is removed. It may block."""
    _before_removal.append(callback)


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
    for callback in _before_removal:
        callback(process_set)
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
    _free_communicators(added)
    del sets.in_use[process_set]
    return True


def add_members_set(
    ranks: Sequence[int], exchange: Exchange, longest_wait_seconds: float, label: str, *, joins: bool = False
) -> ProcessSet:
    """Begin to use a process set that only its members know, which may equal another one. Every member must call it.

    Args:
        ranks: of the world, in ascending order.
        exchange: how the members agree; it raises where one does not come.
        longest_wait_seconds: how long a call waits for other members.
        label: what messages call the set.
        joins: a rank that calls `join()` joins the set, too. Then no member may remove it.

    Returns:
        The set. Its number is the same on all members, and no other set of the world has it.

    Raises:
        ValueError: too many sets at once.
        HorovodInternalError: another member failed to add the set, so no member has it. What that member raises is
            its own error.
    """
    running, sets = basics.running(), part(Sets)
    told = exchange([sets.next_of_members, sets.used_regions()])
    added = InUse(
        _FIRST_OF_MEMBERS + told[0][0] * running.topology.size + ranks[0],
        list(ranks),
        ",".join(map(str, ranks)),
        region=_free_region(used for _, used in told),
        of_members=True,
        joins=joins,
    )
    sets.next_of_members += basics.rank() == ranks[0]

    def add() -> None:
        if len(running.engine_topology.hosts) > 1:
            made = _communicator(running, added)
            added.engine_comm = binding.private(made)
            made.Free()
        running.add_process_set(
            added.number, added.ranks, added.region, added.engine_comm, longest_wait_seconds=longest_wait_seconds
        )

    # No rank writes to the region before all have cleared it.
    _take_step(lambda: running.engine.clear_region(added.region), exchange, ranks, label)
    sets.lost_regions.add(added.region)
    try:
        _take_step(add, exchange, ranks, label)
    except BaseException:
        with suppress(ValueError):  # this rank may not have added it
            running.engine.remove_process_set(added.number)
        raise
    sets.lost_regions.remove(added.region)
    process_set = ProcessSet(ranks)
    sets.in_use[process_set] = added
    return process_set


def _take_step(step: Callable[[], None], exchange: Exchange, ranks: Sequence[int], label: str) -> None:
    """Have every member take a step. If it fails on one of them, all raise."""
    problem = None
    try:
        step()
    except Exception as raised:
        problem = raised
    told = exchange(f"{type(problem).__name__}: {problem}" if problem else None)
    if problem:
        raise problem
    for rank, theirs in zip(ranks, told, strict=True):
        if theirs:
            raise HorovodInternalError(f"{label}: rank {rank} failed to make it: {theirs}")


def remove_members_set(process_set: ProcessSet, exchange: Exchange, reason: str) -> bool:
    """Stop using what `add_members_set` gave. Every member must call it. It waits for calls that are under way.

    If these do not end, or another member does not come for long, this rank ends its part in the set: what other
    members wait for fails with `reason`. The memory of such a set is not used again. A member that does not come is not
    waited for any longer: it may wait for this rank in another set.

    Args:
        process_set: what `add_members_set` has given.
        exchange: as there.
        reason: what this rank has done, such as "rank 1 has called destroy_process_group()".

    Returns:
        Whether all members have come. If not, those that come later expect True from this rank in one more exchange.
    """
    sets, engine = part(Sets), basics.engine()
    added = sets.in_use.pop(process_set)
    sets.lost_regions.add(added.region)
    retired = False

    def retire() -> None:
        nonlocal retired
        if not retired:
            engine.retire(added.number, reason)
        retired = True

    ends_at = time.monotonic() + _SETTLE_SECONDS
    while engine.process_set_busy(added.number):
        if time.monotonic() > ends_at:
            retire()
        time.sleep(_POLL_SECONDS)
    try:
        exchange(None, _SETTLE_SECONDS)
    except Exception as problem:
        retire()
        if isinstance(problem, StallError):
            return False
        raise
    engine.remove_process_set(added.number)
    if not any(exchange(retired)):
        _free_communicators(added)
        sets.lost_regions.remove(added.region)
    return True


def _free_region(used: Iterable[Iterable[int]]) -> int:
    free = set(range(_native.REGIONS)).difference(*used)
    if not free:
        raise ValueError(
            f"{_native.REGIONS} process sets are in use; remove one with hvd.remove_process_set(...), or a group with "
            "torch.distributed.destroy_process_group(group)"
        )
    return min(free)


def _communicator(running: Running, added: InUse) -> Intracomm:
    """Make the communicator of a set that contains this rank. Each rank of the set must call it."""
    assert running.communicator is not None
    world = running.communicator.Get_group()
    group = world.Incl(added.ranks)
    made = running.communicator.Create_group(group, added.number % _TAGS)
    group.Free()
    world.Free()
    return made


def _free_communicators(added: InUse) -> None:
    for comm in (added.mpi_comm, added.engine_comm):
        if comm is not None:
            comm.Free()


def _check_wanted(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    if isinstance(process_sets, str) and process_sets != "dynamic":
        raise ValueError(f'init(process_sets={process_sets!r}): give a list of process sets, or "dynamic"')


def _start(process_sets: Sequence[ProcessSet | Sequence[int]] | str | None) -> None:
    for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(process_set)


def _check_agreement(call: str, value: object, name: str, used: Sequence[int] = ()) -> list[list[int]]:
    """Gives what each rank has of `used`."""
    told = gather_objects((value, used), name, _GLOBAL_ID)
    seen = {rank: value for rank, (value, _) in told.items()}
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
    return [used for _, used in told.values()]


basics.follow(check=_check_wanted, started=_start)
