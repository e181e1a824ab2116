"""The processes of a simulated world, and what happens to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from greenlet import greenlet

from horovodish import _native
from horovodish.runtime import basics
from horovodish.runtime.process import Process


class Wrong(AssertionError):
    """Something does not hold that must."""


@dataclass(frozen=True)
class Fault:
    """A fault that a rank meets after a number of events.

    Attributes:
        event: the number of the event, after the mark if there is one.
        kind: "dies"; "sleeps", for `seconds`; "hears", from the launcher, that `other` was lost; "mpi hears" likewise;
            "delays": for `seconds` nothing arrives of what it sends to `other`; "drops": nothing ever does.
            `ElasticWorld` has further ones.
        rank: to which it happens.
        other: another rank; -1 where there is none.
        seconds: how long it lasts.
        count: of slots.
        mark: only when this many ranks have come to the end of a phase; 0: at once.
    """

    event: int
    kind: str
    rank: int
    other: int = -1
    seconds: float = 0.0
    count: int = 0
    mark: int = 0


class Coroutine(greenlet):
    """A thread of a rank: it waits for something, or until a time."""

    rank: Rank
    until: float = 0.0
    waits_for: Callable[[], bool] | None = None

    def is_ready(self, now: float) -> bool:
        return (self.until <= now or bool(self.waits_for and self.waits_for())) and not self.dead


@dataclass(eq=False)
class Rank:
    """A process of the world.

    Attributes:
        id: of all processes, counted; MPI knows a process by it.
        number: its rank among those that were started together.
        host: where it is.
        start: how many starts there were before this one.
        inits: how often it has called `init()` with the same ranks.
        created: how often it has made a communicator, by what tells such a one from others.
        world: the number of the last world that it was in, counted over all; 0: of none yet.
        members: the ids of the ranks of that world.
        result, problem: what its script returned or raised.
        sleeps_until: until then it does nothing at all, as a stopped process.
        is_dead: it was killed.
        status: with which it has ended.
    """

    id: int
    number: int
    host: int
    start: int
    process: Process = field(default_factory=Process)
    threads: list[Coroutine] = field(default_factory=list)
    inits: Counter[tuple[int, ...]] = field(default_factory=Counter)
    created: Counter[Hashable] = field(default_factory=Counter)
    world: int = 0
    members: tuple[int, ...] = ()
    sleeps_until: float = 0.0
    is_dead: bool = False
    status: int | None = None
    result: Any = None
    problem: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.is_dead or self.status is not None

    @property
    def engine(self) -> _native.Engine | None:
        """Between `init()` and `shutdown()`."""
        running: Any = self.process[basics._Life].running
        return running.engine.native if running else None
