"""Whether an elastic job goes on when it loses a rank, or mpirun: its members decide."""

from collections.abc import Collection, Set

from horovodish.launcher.elastic.members import FORMING, Members
from horovodish.launcher.job.losses import EndOnLoss, Orders
from horovodish.launcher.job.outcome import (
    CONNECTION_BROKE,
    LEFT_STATE,
    SIGNALS,
    Ending,
    Failure,
    exit_status,
    in_words,
)

ASK_SECONDS = 1.0
"""How often to ask what the ranks do: one that is stopped is lost after a while."""


class ElasticPolicy(EndOnLoss):
    """The answers for an elastic job.

    Args:
        members: its ranks.
    """

    def __init__(self, members: Members) -> None:
        self.losses: list[Ending] = []
        self._members = members
        self._ask_at = 0.0

    @property
    def alive(self) -> Set[int]:
        return self._members.alive

    @property
    def are_held(self) -> bool:
        return self._members.held

    @property
    def are_done(self) -> bool:
        return self._members.are_done

    @property
    def last_loss(self) -> str:
        return self._members.last_loss

    @property
    def must_be_ended(self) -> bool:
        return self._members.failed

    def take_orders(self, busy: Collection[int], now: float) -> Orders:
        orders = self._members.take_orders(now)
        if now >= self._ask_at:
            self._ask_at = now + ASK_SECONDS
            self._members.asked(now)
            orders.asks = True
        for rank in busy:
            self._members.answered(rank, "", now)
        orders.drop = self._members.silent(now)
        return orders

    def reached(self, rank: int, phase: str, now: float, commit: int = 0, repeated: int = 0) -> None:
        if phase == "init":
            self._members.arrives(rank)
        elif phase == "running":
            if self._members.phase == FORMING:
                self.losses.clear()  # these are past: the job has survived them
            self._members.runs(rank, now)
        elif phase == "training":
            self._members.trains(rank, now, commit, repeated)
        elif phase in ("regroup", "anew"):
            self._members.left_world(rank, now, anew=phase == "anew")
        elif phase == "exit":
            self._members.is_done(rank, now)

    def answered(self, rank: int, state: str, now: float) -> None:
        self._members.answered(rank, state, now)

    def fail(self, failure: Failure, now: float) -> None:
        if not (failure.is_consequence and self._members.strand(failure.rank, now)):
            self._members.failed = True

    def go_on_when_told(self) -> bool:
        return True  # the host shuts down, perhaps; the end of the rank says more

    def go_on_without_mpirun(self, host: str, now: float) -> bool:
        self._members.end(now, f"mpirun's processes on {host} ended")
        return True

    def go_on_without(self, ending: Ending, host: str, now: float, *, is_needed: bool) -> bool:
        members, rank, status = self._members, ending.rank, exit_status(ending.status)
        if rank in members.stranded:
            self.losses.append(ending)
            members.remove(rank)
            return True
        is_at_its_end = ending.asked and members.has_ended_its_script(rank) and not members.failed
        if is_at_its_end or (status == 0 and (ending.asked or not is_needed)):
            members.finish(rank)
            return True
        if status == LEFT_STATE and members.was_told(rank):
            members.saved_state(rank)
            return True
        is_ours = ending.asked and not ending.why
        script_wants_it = status < SIGNALS and status != CONNECTION_BROKE
        if not members.can_spare(rank) or members.failed or is_ours or script_wants_it:
            members.failed |= not is_ours
            return False
        self.losses.append(ending)
        members.lose(rank, host, ending.why or in_words(ending.status), now)
        return True

    def go_on_without_link(self, rank: int, host: str, why: str, now: float) -> bool:
        if rank in self._members.alive:
            self._members.lose(rank, host, why, now)
        return True
