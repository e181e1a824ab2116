"""The ranks that have the same part, where several sets of ranks have the whole state each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovodish import _native
from horovodish.collectives.adding_sets import add_members_set
from horovodish.collectives.objects import allgather_object
from horovodish.collectives.process_sets import ProcessSet
from horovodish.runtime import basics

__all__ = ["SameParts", "problem_with"]


def problem_with(told: Sequence[tuple[list[int], bool]], ranks: Sequence[int]) -> str | None:
    """The problem with the sets that ranks have given as `shard_set`; None if the sets are right. Pure.

    Args:
        told: by each rank: the ranks of its set, and whether that is in use.
        ranks: of the process set that reduces.
    """
    sets = {rank: theirs for rank, (theirs, _) in zip(ranks, told, strict=True)}
    first = sets[ranks[0]]
    for rank, (theirs, is_in_use) in zip(ranks, told, strict=True):
        if not is_in_use:
            return f"the set of rank {rank} is not in use. Remedy: add it with hvd.add_process_set() on every rank"
        if rank not in theirs:
            return f"rank {rank} is not in its set of ranks {theirs}. Remedy: pass the set that contains the rank"
        if len(theirs) != len(first):
            return (
                f"rank {ranks[0]} has {len(first)} ranks in its set, and rank {rank} has {len(theirs)}. Remedy: sets "
                "of the same size"
            )
        if stranger := next((other for other in theirs if sets.get(other) != theirs), None):
            return (
                f"rank {rank} shares with rank {stranger}, which does not share with the same ranks. Remedy: sets "
                "that have no rank in common and together are all that reduce"
            )
    return None


class SameParts:
    """The ranks that have this rank's part, found once for each start of the engine.

    Args:
        shard_set: the ranks that share the state with this one; None: all.
        process_set: those that reduce.
    """

    def __init__(self, shard_set: ProcessSet | None, process_set: ProcessSet):
        self._shard_set, self._process_set = shard_set, process_set
        self._found: tuple[_native.Engine, ProcessSet | None] | None = None

    def __call__(self) -> ProcessSet | None:
        """A set; None if this is the only rank.

        The first call after a start, with a `shard_set`, blocks, and every rank of `process_set` must make it.

        Raises:
            ValueError: the sets that the ranks have given are not possible; on every rank.
        """
        if self._shard_set is None:
            return None
        engine = basics.engine()
        if self._found is None or self._found[0] is not engine:
            self._found = engine, _across(self._shard_set, self._process_set)
        return self._found[1]


def _across(shard_set: ProcessSet, process_set: ProcessSet) -> ProcessSet | None:
    told = allgather_object((shard_set.ranks, shard_set.process_set_id is not None), process_set=process_set)
    if problem := problem_with(told, process_set.ranks):
        raise ValueError(f"shard_set: {problem}")
    place = shard_set.ranks.index(basics.rank())
    members = sorted({theirs[place] for theirs, _ in told})
    return members_set(members, process_set, "the ranks with equal parts") if len(members) > 1 else None


def members_set(members: Sequence[int], process_set: ProcessSet, label: str) -> ProcessSet:
    """A process set that this rank needs, where each rank of another set needs one. Every rank of that must call it.

    Args:
        members: the ranks of this rank's set, this rank among them; all of them pass the same.
        process_set: the ranks that call.
        label: what messages call the set.
    """
    ranks = process_set.ranks

    def exchange(value: Any, seconds: float | None = None) -> list[Any]:
        of_all = allgather_object(value, process_set=process_set)
        return [of_all[ranks.index(member)] for member in members]

    return add_members_set(members, exchange, 0.0, label, joins=True)
