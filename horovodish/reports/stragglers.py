"""Which ranks make the others wait."""

from dataclasses import dataclass

from horovodish.collectives.process_sets import ProcessSet, checked_id, global_process_set
from horovodish.collectives.submission import gather_objects, generated_name
from horovodish.gradients.late_steps import missed_steps
from horovodish.reports.durations import text_of_seconds
from horovodish.runtime import basics

__all__ = ["RankLateness", "StragglerReport", "straggler_report"]

_SHOWN_RANKS = 16


@dataclass(frozen=True)
class RankLateness:
    """How long one rank made the others wait.

    Attributes:
        rank: of the world.
        times_last: how many collectives it was the last rank to submit.
        mean_seconds: how far it was behind the first rank to submit each of these, on average; 0 if there is none.
        longest_seconds: how far at most.
        missed_steps: how many steps of optimizers with `wait_for=` went on before this rank had a gradient for them.
    """

    rank: int
    times_last: int = 0
    mean_seconds: float = 0.0
    longest_seconds: float = 0.0
    missed_steps: int = 0

    @property
    def total_seconds(self) -> float:
        """How long the first rank has waited for this one, in all."""
        return self.times_last * self.mean_seconds


@dataclass(frozen=True)
class StragglerReport:
    """Which ranks make the others wait; `str()` of it is a table, the worst rank first.

    Attributes:
        ranks: one entry for every rank of the process set, by rank.
        steps: how many steps the first of these ranks has begun: of wrapped optimizers, or reductions by tapes.
    """

    ranks: tuple[RankLateness, ...]
    steps: int = 0

    @property
    def collectives(self) -> int:
        """How many collectives are counted."""
        return sum(one.times_last for one in self.ranks)

    @property
    def slowest(self) -> RankLateness:
        """The rank that the others have waited for longest in all."""
        return max(self.ranks, key=lambda one: one.total_seconds)

    def __str__(self) -> str:
        worst_first = sorted(self.ranks, key=lambda one: (one.total_seconds, one.missed_steps), reverse=True)
        are_missed = any(one.missed_steps for one in self.ranks)
        in_steps = f", {self.steps} steps" if self.steps else ""
        lines = [
            f"which rank was last ({self.collectives} collectives, {len(self.ranks)} ranks{in_steps}):",
            "  rank   times last     mean wait  longest wait    total wait" + "  missed steps" * are_missed,
        ]
        for one in worst_first[:_SHOWN_RANKS]:
            share = f"{one.times_last / max(1, self.collectives):.0%}"
            waits = "".join(
                f"{text_of_seconds(seconds):>14}"
                for seconds in (one.mean_seconds, one.longest_seconds, one.total_seconds)
            )
            missed = f"{one.missed_steps:>14}" if are_missed else ""
            lines.append(f"{one.rank:>6}{one.times_last:>8}{share:>5}{waits}{missed}")
        if len(worst_first) > _SHOWN_RANKS:
            lines.append(f"  and {len(worst_first) - _SHOWN_RANKS} more ranks; the others waited less for them")
        return "\n".join(lines)


def straggler_report(process_set: ProcessSet = global_process_set) -> StragglerReport:
    """Report which ranks make the others wait, since `init()` or since the process set was added. Collective; blocks.

    A collective starts when its last rank has submitted it. For each rank, the report says how often it was last, and
    how long the first rank had waited by then. A rank that is slow in most steps, or far behind
    now and then, has a large total. The number alone says little, because the rank that leaves one collective last also
    enters the next one last, by microseconds. All collectives count, also barriers and earlier calls of this function.
    The times are a part of the messages of the negotiation, so a training job sends no more messages.

    Between hosts the times are as exact as the hosts' clocks (NTP, PTP). Within a host they are exact to 0.1 ms.

    Every rank of the process set must call it, and gets the same report.

    Args:
        process_set: the ranks that call it.

    Returns:
        The report.

    Raises:
        ValueError: the set is not in use, this rank is outside it, or its first rank has joined.
        RankLostError: a rank died, raised or left.
        NotInitializedError: before `init()`.

    Example:
        >>> report = hvd.straggler_report()
        >>> if hvd.rank() == 0:
        ...     print(report)
        which rank was last (200 collectives, 2 ranks):
          rank   times last     mean wait  longest wait    total wait
             1     197  98%       12.1 ms       14.3 ms        2.38 s
             0       3   2%         40 us         92 us        120 us
    """
    identity = checked_id(process_set)
    engine = basics.engine()
    own = None
    if basics.rank() == process_set.ranks[0]:
        own = (engine.lateness(identity), engine.steps(), missed_steps(process_set))
    gathered = gather_objects(own, generated_name("straggler_report", identity), identity)
    known = next((figures for figures in gathered.values() if figures is not None), None)
    if known is None:
        raise ValueError(f"straggler_report: rank {process_set.ranks[0]}, which has the figures, has joined")
    table, steps, missed = known
    ranks = []
    for rank in process_set.ranks:
        times_last, total_seconds, longest_seconds = table.get(rank, (0, 0.0, 0.0))
        mean_seconds = total_seconds / max(1, times_last)
        ranks.append(RankLateness(rank, times_last, mean_seconds, longest_seconds, missed[rank]))
    return StragglerReport(tuple(ranks), steps)
