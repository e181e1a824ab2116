"""Which ranks of an elastic job take part, and what they are told when that changes.

    training    all ranks of the world train
    gathering   a rank is lost, or new hosts are there: the ranks leave the world, each as soon as it notices
    forming     all have left; those that live make a new world in the same processes
    ending      they leave their state in memory and end, because new processes go on

Whatever does not end in time falls to `ending`. Nothing here moves bytes or reads a clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

LEFT_STATE = 75
"""The exit status of a rank that has left its state in memory: `horovodish.elastic.membership.ENDS`."""
STOPPED_SECONDS = 5.0
"""How long a rank may be stopped, or its supervisor silent, before it counts as lost."""
FORMING_SECONDS = 10.0
"""How long the ranks may take to make a new world."""
ENDING_SECONDS = 10.0
"""How long they may take to leave their state and end."""

TRAINING, GATHERING, FORMING, ENDING = "training", "gathering", "forming", "ending"


@dataclass
class Orders:
    """What the launcher has to do.

    Attributes:
        news: lines for ranks.
        kill: ranks to kill.
        ends: whether the time of the ranks that are left is over.
        said: lines for the user.
    """

    news: list[tuple[int, str]] = field(default_factory=list)
    kill: list[int] = field(default_factory=list)
    ends: bool = False
    said: list[str] = field(default_factory=list)


class Members:
    """The ranks of one start.

    Args:
        ranks: how many were started.
        least: with how many the job can go on.
        in_same_processes: whether MPI can go on without a lost rank.
        gathering_seconds: how long ranks may compute before they notice that others have left.

    Attributes:
        alive: the ranks that have not ended.
        lost: the ranks that were lost, in this order.
        finished: how many ranks came to the end of their script.
        has_run: whether a world was complete.
        phase: as above.
    """

    def __init__(self, ranks: int, least: int, in_same_processes: bool, gathering_seconds: float) -> None:
        self.alive = set(range(ranks))
        self.lost: list[int] = []
        self.finished = 0
        self.has_run = False
        self.phase = TRAINING
        self._least = least
        self._in_same_processes = in_same_processes
        self._gathering_seconds = gathering_seconds
        self._out: set[int] = set()  # have left the world
        self._in: set[int] = set()  # run in the new one
        self._since = 0.0  # of the phase
        self._stuck: dict[int, float] = {}  # since when, by rank
        self._disturbed_at = 0.0
        self._orders = Orders()

    @property
    def are_done(self) -> bool:
        """Whether every rank that was not lost came to the end of its script."""
        return self.finished > 0 and not self.alive

    def take_orders(self, now: float) -> Orders:
        """What is to be done now."""
        waited = now - self._since
        if self.phase == GATHERING and self.alive <= self._out:
            self._form(now)
        elif self.phase == GATHERING and waited > self._gathering_seconds:
            late = self.alive - self._out
            self._orders.said.append(f"{_named(late)} did not notice for {waited:.0f} s that others have gone")
            self._orders.kill += late
        elif self.phase == FORMING and waited > FORMING_SECONDS:
            self.end(now, f"the ranks did not come together within {waited:.0f} s")
        elif self.phase == ENDING and waited > ENDING_SECONDS:
            self._orders.ends = True
        if self.phase != ENDING:
            stuck = [rank for rank, since in self._stuck.items() if rank in self.alive]
            self._orders.kill += [rank for rank in stuck if now - self._stuck[rank] > STOPPED_SECONDS]
        orders, self._orders = self._orders, Orders()
        return orders

    def lose(self, rank: int, why: str, now: float) -> None:
        """A rank has ended before its work was done.

        Args:
            rank: which one.
            why: what happened, as the end of a sentence that begins with the rank.
            now: the time.
        """
        self._remove(rank)
        self.lost.append(rank)
        self._orders.said.append(f"rank {rank} {why}; {len(self.alive)} left")
        if self.phase == FORMING:
            self.end(now, "one more rank was lost while the others began again")
        elif self.phase in (TRAINING, GATHERING):
            self._gather(now)
            self._orders.news += [(other, f"lost {rank}") for other in sorted(self.alive - self._out)]

    def finish(self, rank: int) -> None:
        """A rank came to the end of its script."""
        self._remove(rank)
        self.finished += 1

    def left_state(self, rank: int) -> None:
        """A rank has ended because it was told to."""
        self._remove(rank)

    def left_world(self, rank: int, now: float) -> None:
        """A rank has called `shutdown()` and waits to be told what comes."""
        self._out.add(rank)
        if self.phase == TRAINING:
            self._gather(now)
        elif self.phase == FORMING:
            self.end(now, "the ranks lost touch while they began again")
        elif self.phase == ENDING:
            self._orders.news.append((rank, "end"))

    def runs(self, rank: int, now: float) -> None:
        """`init()` has returned on a rank."""
        self._in.add(rank)
        if self.alive <= self._in:
            self.has_run = True
            if self.phase == FORMING:
                self.phase = TRAINING
                took = now - self._disturbed_at
                self._orders.said.append(f"{len(self.alive)} ranks go on after {took:.2f} s, in the same processes")

    def answered(self, rank: int, state: str, now: float) -> None:
        """What a rank's process does, as /proc has it: "T" where it is stopped."""
        if state in "Tt":
            self._stuck.setdefault(rank, now)
        else:
            self._stuck.pop(rank, None)

    def end(self, now: float, why: str) -> None:
        """New processes shall go on.

        Args:
            now: the time.
            why: the ranks cannot go on in the same ones.
        """
        if self.phase == ENDING:
            return
        if self.phase == TRAINING:
            self._disturbed_at = now
        self.phase, self._since = ENDING, now
        self._orders.said.append(f"new processes go on: {why}")
        # A rank that has not left the world learns it when it does so, or is ended with the rest.
        self._orders.news += [(rank, "lost 0") for rank in sorted(self.alive - self._out)]
        self._orders.news += [(rank, "end") for rank in sorted(self.alive)]

    def _gather(self, now: float) -> None:
        if self.phase == TRAINING:
            self.phase, self._since, self._disturbed_at = GATHERING, now, now

    def _form(self, now: float) -> None:
        if not self.alive:
            return
        if not self._in_same_processes:
            self.end(now, "MPI cannot go on without a lost rank")
        elif len(self.alive) < self._least:
            self.end(now, f"{len(self.alive)} ranks are fewer than --min-np {self._least}")
        else:
            self.phase, self._since = FORMING, now
            world = ",".join(map(str, sorted(self.alive)))
            self._orders.news += [(rank, f"world {world}") for rank in sorted(self.alive)]
            self._out.clear()
            self._in.clear()

    def _remove(self, rank: int) -> None:
        self.alive.discard(rank)
        self._out.discard(rank)
        self._stuck.pop(rank, None)


def _named(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
