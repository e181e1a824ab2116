"""Whether a job goes on when it loses a rank, or mpirun: `EndOnLoss`, which an elastic job's policy extends.

A `Job` asks before it ends because of something that has happened to a rank or to MPI.
"""

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field

from horovodish.launcher.job.outcome import Ending, Failure


@dataclass
class Orders:
    """Orders for the launcher.

    Attributes:
        news: lines for ranks.
        kill: ranks to kill, and why, as the end of a sentence that begins with the rank.
        ends: whether the time of the ranks that are left is over.
        at_once: whether they are killed then. Otherwise they are asked to end first.
        asks: whether to ask the supervisors of all ranks what these do.
        drop: ranks whose supervisors have not answered for too long.
    """

    news: list[tuple[int, str]] = field(default_factory=list)
    kill: list[tuple[int, str]] = field(default_factory=list)
    ends: bool = False
    at_once: bool = False
    asks: bool = False
    drop: list[int] = field(default_factory=list)


class EndOnLoss:
    """The answers for a job that ends when it loses a rank."""

    losses: Sequence[Ending] = ()
    """How ranks have ended without which the others want to go on, and have not yet."""

    @property
    def alive(self) -> Set[int]:
        """The ranks that can go on without others."""
        return frozenset()

    @property
    def are_held(self) -> bool:
        """Whether the ranks wait in init() for the launcher, not for each other."""
        return False

    @property
    def are_done(self) -> bool:
        """Whether every rank came to the end of its script, but for those without which others have gone on."""
        return False

    @property
    def last_loss(self) -> str:
        """A rank that was lost and what happened, if the others have not gone on without it."""
        return ""

    @property
    def must_be_ended(self) -> bool:
        """Whether the ranks would wait for a word of the launcher that will not come."""
        return False

    def take_orders(self, busy: Collection[int], now: float) -> Orders:
        """The orders that the job has to carry out now.

        Args:
            busy: the ranks whose supervisors may have answered, but behind output that nobody reads.
            now: the time.
        """
        return Orders()

    def reached(self, rank: int, phase: str, now: float, commit: int = 0, repeated: int = 0) -> None:
        """A rank has reached a phase; see waiting.py.

        Args:
            rank: which one.
            phase: as in waiting.py.
            now: the time.
            commit: with "training", the commit that it continues from; 0 at the beginning.
            repeated: likewise, how many steps are repeated.
        """

    def answered(self, rank: int, state: str, now: float) -> None:
        """A supervisor says what its rank does."""

    def fail(self, failure: Failure, now: float) -> None:
        """A rank's script has raised."""

    def go_on_when_told(self) -> bool:
        """Whether the job goes on although mpirun wants a rank to end."""
        return False

    def go_on_without_mpirun(self, host: str, now: float) -> bool:
        """Whether the job goes on although mpirun, or its daemon on a host, has ended."""
        return False

    def go_on_without(self, ending: Ending, host: str, now: float, *, is_needed: bool) -> bool:
        """Whether the job goes on although a rank has ended.

        Args:
            ending: how the rank has ended.
            host: where it was.
            now: the time.
            is_needed: whether others may need it.
        """
        return False

    def go_on_without_link(self, rank: int, host: str, why: str, now: float) -> bool:
        """Whether the job goes on although the supervisor of a rank is gone."""
        return False
