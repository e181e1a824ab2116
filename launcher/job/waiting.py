"""Find the rank that others wait for outside of collectives. The engine does not see those waits.

A rank says which *phase* it has reached:

    init       it has called init()
    running    init() has returned
    training   running, and the state of an elastic job is there
    shutdown   it has called shutdown(), or its script has ended without
    stopped    shutdown() has returned
    exit       its script has ended; MPI waits for the other ranks
    regroup    it has left the world of an elastic job, and waits for the other ranks to do so
    anew       likewise, and it cannot go on in this process

Nothing here moves bytes or reads a clock.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

ANSWER_SECONDS = 5.0
"""How long a supervisor may take to say what its rank does."""
DESERTED_SECONDS = 3.0
"""How long ranks may wait in init() for a rank that has ended. The news that it called init() may be under way."""
LEFT_SECONDS = 10.0
"""How long a rank may go on after shutdown() while others wait for it to begin again, before they say so."""
MOST_NAMED = 4

_NEEDED = ("init", "running", "training")
"""The phases when others may need a rank: until it calls shutdown(), as every script does at its end."""
_PLACES = {"init": "in init()", "shutdown": "in shutdown()", "exit": "at the end of the script", "": ""}
"""Where ranks wait for others, by their phase. The phase "" means that the rank has ended."""
_STATES = {
    "T": "is stopped; kill -CONT {pid} there lets it go on",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a network file system",
    "R": "is computing",
    "S": "sleeps, or waits for something",
}
"""By the letter that /proc/PID/stat has for a process."""


@dataclass(frozen=True)
class Notice:
    """A message for the user.

    Attributes:
        text: in words.
        ends_job: whether the job ends with it.
    """

    text: str
    ends_job: bool


@dataclass
class _Rank:
    host: str
    supervisor: int
    pid: int = 0
    phase: str | None = None
    since: float = 0.0  # in that phase
    has_begun: bool = False  # it has called init()
    state: str | None = None  # what its supervisor has answered
    stuck_since: float | None = None  # since then, every answer has found it stuck

    @property
    def is_stuck(self) -> bool:
        """Whether the rank cannot go on by itself: it is stopped, or its supervisor does not answer."""
        return self.state is None or self.state in "Tt"


class Waiting:
    """The launcher's knowledge of the ranks' phases, and when to ask for more.

    Args:
        warning_seconds: seconds of waiting before a warning; 0: no warning.
        shutdown_seconds: how long they wait before the job ends; 0: it never does.
    """

    def __init__(self, warning_seconds: float, shutdown_seconds: float) -> None:
        self._warning_seconds = warning_seconds
        self._shutdown_seconds = shutdown_seconds
        self._ranks: dict[int, _Rank] = {}
        self._first_pause = min(filter(None, (warning_seconds, shutdown_seconds)), default=0.0)
        self._pause = self._first_pause
        self._ask_at: float | None = None
        self._answers_until: float | None = None
        self._told: set[int] = set()  # the ranks that `left_behind()` has reported

    def began(self, places: Mapping[int, tuple[str, int]]) -> None:
        """Notes that the ranks are started, with the host and the process of the supervisor of each."""
        self._ranks = {rank: _Rank(host, supervisor) for rank, (host, supervisor) in places.items()}

    def reached(self, rank: int, phase: str, pid: int, now: float) -> None:
        """Notes that a process of the rank has reached a phase."""
        its = self._ranks[rank]
        its.phase, its.pid, its.since = phase, pid, now
        its.has_begun |= phase == "init"

    def released(self, now: float) -> None:
        """Notes that ranks have waited for the launcher until now, not for each other."""
        for its in self._ranks.values():
            its.since = now

    def is_needed(self, rank: int) -> bool:
        """Whether others may need the rank."""
        return self._ranks[rank].phase in _NEEDED

    def has_left(self, rank: int) -> bool:
        """Whether the rank's script has ended, and the engine of the rank with it."""
        return self._ranks[rank].phase == "exit"

    def ended(self, rank: int, now: float) -> None:
        """Notes that the rank has ended with exit status 0."""
        self._ranks[rank].phase, self._ranks[rank].since = "", now

    def answered(self, rank: int, pid: int, state: str) -> None:
        """Notes the answer of a supervisor: a process of its rank, and the state of that process."""
        its = self._ranks[rank]
        its.pid, its.state = pid, state

    def deserted(self, now: float) -> str | None:
        """A message if ranks wait in init() for a rank that has ended; None if they do not."""
        left = [rank for rank, its in self._ranks.items() if its.phase == "" and not its.has_begun]
        waiting = self._in("init")
        if not left or not waiting:
            return None
        begin = max(min(self._ranks[rank].since for rank in each) for each in (left, waiting))
        if now - begin < DESERTED_SECONDS:
            return None
        # What `python - < train.py` looks like: the other ranks run an empty script.
        of_stdin = " (only rank 0 reads stdin: start a script from a file)" if waiting == [0] else ""
        return (
            f"{self._named(left)} ended with exit status 0 without init(), where {ranks_in_words(waiting)} "
            f"{'waits' if len(waiting) == 1 else 'wait'} for it. Remedy: let every rank call init(), or none{of_stdin}"
        )

    def left_behind(self, now: float) -> str:
        """A message, once, if ranks of an elastic job wait for a rank that has called shutdown() by itself."""
        waiting = self._in("regroup")
        left = {rank for rank in self._in("stopped") if now - self._ranks[rank].since > LEFT_SECONDS} - self._told
        if not waiting or not left:
            return ""
        self._told |= left
        processes = ", ".join(str(self._ranks[rank].pid) for rank in sorted(left))
        return (
            f"{self._named(left)} called shutdown() more than {LEFT_SECONDS:.0f} s ago and still "
            f"{'runs' if len(left) == 1 else 'run'}, as process {processes}. {ranks_in_words(waiting)} "
            f"{'waits' if len(waiting) == 1 else 'wait'} for it to end"
        )

    def places(self, now: float) -> list[dict[str, Any]]:
        """Where each rank is, its phase, and how long it has been in this phase, for `horovodish status`."""
        return [
            {"rank": rank, "host": its.host, "process": its.pid, "supervisor": its.supervisor, "phase": its.phase,
             "phase_seconds": now - its.since}
            for rank, its in self._ranks.items()
        ]  # fmt: skip

    def standing(self, now: float) -> list[tuple[float, str]]:
        """Who waits outside of collectives: for how many seconds, and for whom by the last answers of supervisors."""
        found = []
        for where in _PLACES:
            waiting, missing = self._waiting_and_missing(where)
            if waiting and missing:
                waited = now - min(self._ranks[rank].since for rank in waiting)
                found.append((waited, self._in_words(where, waiting, missing, waited)))
        return found

    def asks(self, now: float) -> bool:
        """Whether to ask now the supervisors of all ranks that have not ended what their ranks are doing."""
        waiting = [its.since for its in self._ranks.values() if its.phase in _PLACES]
        if not waiting or not self._alive or not self._first_pause:
            self._ask_at, self._answers_until, self._pause = None, None, self._first_pause
            return False
        if self._ask_at is None:
            self._ask_at = min(waiting) + self._first_pause
        if self._answers_until is not None or now < self._ask_at:
            return False
        self._answers_until = now + ANSWER_SECONDS
        for its in self._ranks.values():
            its.state = None
        return True

    def notice(self, now: float) -> Notice | None:
        """The message that follows from the answers, once all supervisors have answered or their time is over."""
        if self._answers_until is None:
            return None
        if now < self._answers_until and any(self._ranks[rank].state is None for rank in self._alive):
            return None
        self._answers_until = None
        self._ask_at = now + self._pause
        for its in self._ranks.values():
            its.stuck_since = (now if its.stuck_since is None else its.stuck_since) if its.is_stuck else None
        notices = (self._notice_of(phase, now) for phase in _PLACES)
        return next((notice for notice in notices if notice), None)

    def _waiting_and_missing(self, where: str) -> tuple[list[int], list[int]]:
        missing = [rank for rank in self._alive if self._is_missing(rank, where)]
        return [rank for rank in self._in(where) if rank not in missing], missing

    def _notice_of(self, where: str, now: float) -> Notice | None:
        waiting, missing = self._waiting_and_missing(where)
        if not waiting or not (missing or (where == "init" and len(waiting) == len(self._alive))):
            return None
        waited = now - min(self._ranks[rank].since for rank in waiting)
        # Outside of init() the ranks may wait for one that computes. Only one that stays stuck ends the job.
        stuck = [now - its.stuck_since for its in map(self._ranks.__getitem__, missing) if its.stuck_since is not None]
        in_vain = waited if where == "init" else min(waited, max(stuck, default=-1.0))
        if 0 <= in_vain < self._shutdown_seconds:
            self._ask_at = min(now + self._pause, now + self._shutdown_seconds - in_vain)
        ends = 0 < self._shutdown_seconds <= in_vain
        if not ends and not 0 < self._warning_seconds <= waited:
            return None
        self._pause *= 2
        return Notice(self._in_words(where, waiting, missing, waited), ends)

    @property
    def _alive(self) -> list[int]:
        return [rank for rank, its in self._ranks.items() if its.phase != ""]

    def _in(self, phase: str) -> list[int]:
        return [rank for rank, its in self._ranks.items() if its.phase == phase]

    def _is_missing(self, rank: int, where: str) -> bool:
        its = self._ranks[rank]
        if where == "init":
            return its.is_stuck or its.phase in (None, "stopped", "exit")
        if where == "shutdown":
            return its.is_stuck or its.phase in (None, *_NEEDED)
        if where == "exit":
            return its.is_stuck or its.phase in (None, *_NEEDED, "stopped")
        return its.is_stuck

    def _in_words(self, where: str, waiting: list[int], missing: list[int], waited: float) -> str:
        who = ranks_in_words(waiting)
        text = f"{who} {'has' if len(waiting) == 1 else 'have'} waited {_PLACES[where]} for {waited:.0f} s"
        if not where:
            text = f"{who} ended {waited:.0f} s ago"
        if not missing:
            text = f"{text}, and no rank is missing there"
            is_between_hosts = len({its.host for its in self._ranks.values()}) > 1
            return f"{text}. Between hosts, that is a firewall or the wrong network" if is_between_hosts else text
        named = [f"{self._named([rank])}{self._what(rank, where)}" for rank in missing[:MOST_NAMED]]
        more = len(missing) - len(named)
        return f"{text}: " + "; ".join(named) + (f"; and {more} more" if more else "")

    def _what(self, rank: int, where: str) -> str:
        """A description of a rank that others wait for."""
        its = self._ranks[rank]
        if its.state is None:
            return f" does not answer: its supervisor, process {its.supervisor} there, or the host is stopped"
        state = _STATES.get(its.state, f"is in state {its.state}").format(pid=its.pid)
        known = " has not called init()" if where == "init" and its.phase is None else ""
        return f"{known}: its process {its.pid} {state}"

    def _named(self, ranks: Collection[int]) -> str:
        hosts = ", ".join(dict.fromkeys(self._ranks[rank].host for rank in ranks))
        return f"{ranks_in_words(ranks)} on {hosts}"


def ranks_in_words(ranks: Collection[int]) -> str:
    """For example "rank 3" or "ranks 0-2, 7".

    Args:
        ranks: not empty.
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
