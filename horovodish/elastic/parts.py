"""Copies of a state that the ranks share, each with its part: all ranks make the copies together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from horovodish.collectives.objects import allgather_object
from horovodish.elastic.copies import Copies
from horovodish.elastic.memory import Position, Schedule
from horovodish.errors import MismatchError
from horovodish.runtime import basics

__all__ = ["copy_together"]


class _State(Protocol):
    _copies: Copies

    def _gather_parts(self, roots: Sequence[int]) -> None: ...
    def _write(self, position: Position, *, waits: bool) -> None: ...


def copy_together(state: _State, position: Position, schedule: Schedule) -> Schedule:
    """Copy a commit to the memory of each host. Collective; blocks.

    One rank of each host gets the parts of all ranks, one tensor after the other, and writes.

    Args:
        state: the state; each rank has a part of it.
        position: of the commit.
        schedule: the same on all ranks.

    Returns:
        The schedule of the next copies; the same on all ranks.

    Raises:
        MismatchError: the ranks are at different commits.
    """
    began = time.monotonic()
    told = allgather_object((position, state._copies.memory.place), "elastic.parts")
    if any(theirs != position for theirs, _ in told):
        numbers = ", ".join(f"rank {rank}: {theirs[2]}" for rank, (theirs, _) in enumerate(told))
        raise MismatchError(
            f"the ranks copy different commits of a state with a sharded optimizer ({numbers}). Remedy: call commit() "
            "and save() equally often on all ranks"
        )
    places = [place for _, place in told]
    roots = [places.index(place) for place in dict.fromkeys(places)]
    state._gather_parts(roots)
    if basics.rank() in roots:
        state._write(position, waits=True)
    state._gather_parts(())
    own = schedule.after(position[2], time.monotonic(), time.monotonic() - began)
    # The ranks must agree on the period, and no rank goes on before all hosts have the copy.
    period = max(allgather_object(own.period, "elastic.period"))
    return Schedule(period, own.commit, own.copied_at)
