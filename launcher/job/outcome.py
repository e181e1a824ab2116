"""How a job ended: which rank failed first, what to say about it, and the exit status."""

import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from horovodish.launcher.hosts.allocation import HostRanks
from horovodish.launcher.job.launcher_end import Hello
from horovodish.launcher.job.waiting import ranks_in_words
from horovodish.launcher.supervisor.supervisor import NOT_FOUND
from horovodish.settings import AT_END

UNCAUGHT_EXCEPTION = 1  # Python's exit status
SIGNALS = 128
"""Exit status 128 + n stands for signal n. Shells report it, too, for a command that they ran."""
CONNECTION_BROKE = 14
"""Open MPI ends a rank with this status, without a word, when the connection to a rank that has ended breaks."""
LEFT_STATE = 75
"""The exit status of a rank of an elastic job that was told to end: `horovodish.elastic.membership.ENDS`."""
LONGEST_ERROR = 500
UNREADABLE = "an exception whose report cannot be read"


@dataclass(frozen=True)
class Failure:
    """The report that a rank that raises writes to its run folder, as `rank-<rank>.failure`, before it ends.

    Attributes:
        rank: the rank.
        time: of the exception, in seconds since the epoch.
        error: class and message of the exception, such as "ValueError: no such file".
        traceback: as Python prints it. Empty if the rank has printed it itself, or if another rank's says more.
        is_consequence: whether the exception only says that another rank was lost.
        place: the line of the script that waited for another rank, such as "train.py:12", or `AT_END`; empty if it did
            not, or if it does not matter.
    """

    rank: int
    time: float
    error: str
    traceback: str = ""
    is_consequence: bool = False
    place: str = ""

    @staticmethod
    def of(rank: int, report: str) -> "Failure":
        """Reads the report of a rank. If it cannot be read, at least the rank has raised."""
        try:
            content = json.loads(report)
            return Failure(
                rank,
                float(content["time"]),
                str(content["error"]),
                str(content["traceback"]),
                bool(content["is_consequence"]),
                str(content["place"]),
            )
        except (ValueError, KeyError, TypeError):
            return Failure(rank, time.time(), UNREADABLE)

    @property
    def is_interrupt(self) -> bool:
        """Whether the exception only says that the user interrupted the rank."""
        return self.error.startswith("KeyboardInterrupt")


@dataclass(frozen=True)
class Ending:
    """How the process of a rank ended.

    Attributes:
        rank: the rank.
        time: of its end, in seconds since the epoch.
        status: as waitpid() gives it.
        asked: whether the launcher or mpirun had asked it to end.
        why: why the launcher has killed it for its own fault, as the end of a sentence; empty if it has not.
        had_left: whether its script had ended before it was asked, so that an exit status is its own.
    """

    rank: int
    time: float
    status: int
    asked: bool
    why: str = ""
    had_left: bool = False


@dataclass(frozen=True)
class Refusal:
    """Why no rank was started.

    Attributes:
        exit_status: of the launcher.
        what: what keeps the ranks from being started, in words.
    """

    exit_status: int
    what: str


@dataclass(frozen=True)
class Fault:
    """A rank that failed before anything asked it to end.

    Attributes:
        rank: the rank.
        time: when, in seconds since the epoch.
        exit_status: as a shell would give it.
        what: what happened to the rank, in words.
        is_consequence: whether the rank only reports that another one has failed.
    """

    rank: int
    time: float
    exit_status: int
    what: str
    is_consequence: bool


def named_twice(hellos: Iterable[Hello], host_ranks: Sequence[HostRanks]) -> dict[int, str]:
    """The ranks on a machine that has another name already, and why they cannot run there, as a `Hello` says it.

    Each name has a daemon of its own. Open MPI's ranks fail where they meet neighbours of another daemon, and with
    every MPI the slots of one machine would count twice.

    Args:
        hellos: of all ranks.
        host_ranks: which of them run where.
    """
    by_rank = sorted(hellos, key=lambda hello: hello.rank)
    if len({hello.host_id for hello in by_rank}) == len(host_ranks):
        return {}
    firsts: dict[tuple[str, str], tuple[int, str]] = {}
    problems = {}
    for hello in by_rank:
        name = next(each.host for each in host_ranks if hello.rank in each.ranks)
        daemon, first = firsts.setdefault(hello.host_id, (hello.daemon, name))
        if hello.daemon != daemon and name != first:
            problems[hello.rank] = f"2 {first} and {name} are two names of one machine: name it once, with all slots"
    return problems


def refusal_of(hellos: Iterable[Hello]) -> Refusal | None:
    """Why the command cannot be run on some of the hosts; None if it can be run on all."""
    hosts: dict[str, list[str]] = {}
    by_rank = sorted(hellos, key=lambda hello: hello.rank)
    for hello in by_rank:
        if hello.problem and hello.host not in hosts.setdefault(hello.problem, []):
            hosts[hello.problem].append(hello.host)
    if not hosts:
        return None
    lines = [f"{problem.split(' ', 1)[1]} (on {', '.join(names)})" for problem, names in hosts.items()]
    if any(not hello.problem for hello in by_rank) and any(problem.startswith(f"{NOT_FOUND} ") for problem in hosts):
        lines.append("programs and scripts must be at the same paths on every host")
    return Refusal(int(next(iter(hosts)).split(" ", 1)[0]), "\n".join(lines))


def first_fault(
    endings: Iterable[Ending], failures: Iterable[Failure], last_errors: Mapping[int, str] | None = None
) -> Fault | None:
    """The root cause: the first fault that is no consequence of another one, else the first. None if no rank failed.

    Args:
        endings: of the ranks that have ended.
        failures: the exceptions that ranks have reported.
        last_errors: by rank, exceptions that a rank has not reported but written to stderr.

    Example:
        >>> first_fault([Ending(0, 2.0, 9, asked=True), Ending(1, 1.0, 3 << 8, asked=False)], []).what
        'failed with exit status 3'
    """
    raised = {failure.rank: failure for failure in failures}
    faults = []
    for ending in endings:
        status = exit_status(ending.status)
        if status != 0 and ending.rank in raised:
            failure = raised[ending.rank]
            status = UNCAUGHT_EXCEPTION if ending.asked else status  # it hung at its exit
            what = f"failed with exit status {status}: {shortened(failure.error)}"
            if failure.place:
                what = what.removesuffix(".") + who_waits(raised.values())
            faults.append(Fault(ending.rank, failure.time, status, what, failure.is_consequence))
        elif status != 0 and (not ending.asked or (ending.had_left and os.WIFEXITED(ending.status))):
            what = ending.why or in_words(ending.status)
            if not os.WIFSIGNALED(ending.status) and last_errors and ending.rank in last_errors:
                what += f": {shortened(last_errors[ending.rank])}"
            elif how := how_it_left(ending.rank, raised.values()):
                what += f": it {how}{who_waits(raised.values())}"
            elif os.WIFEXITED(ending.status) and has_died(ending.rank, raised.values()):
                what += ", without ending its script. Did it call os._exit()?"
            faults.append(Fault(ending.rank, ending.time, status, what, is_consequence=status == CONNECTION_BROKE))
    return min(faults, key=lambda fault: (fault.is_consequence, fault.time), default=None)


def how_it_left(rank: int, failures: Iterable[Failure]) -> str:
    """How ranks that wait describe a rank that left without raising, such as "called sys.exit(3) in train.py:19"."""
    for failure in failures:
        found = re.search(rf"\brank {rank} ((?:called|has ended) .*)", failure.error)
        if failure.place and found:
            return found[1]
    return ""


def has_died(rank: int, failures: Iterable[Failure]) -> bool:
    """Whether ranks say of one that its process has ended before its script has."""
    return any(f"rank {rank} has died" in failure.error for failure in failures)


def who_waits(failures: Iterable[Failure]) -> str:
    """For example "; rank 0 waits in train.py:12, ranks 1-2 wait in train.py:30"."""
    places: dict[str, list[int]] = {}
    for failure in sorted(failures, key=lambda failure: failure.rank):
        if failure.place:
            places.setdefault(failure.place, []).append(failure.rank)
    waiting = [
        f"{ranks_in_words(ranks)} {'wait' if len(ranks) > 1 else 'waits'} {place if place == AT_END else f'in {place}'}"
        for place, ranks in places.items()
    ]
    return "; " * bool(waiting) + ", ".join(waiting)


def exit_status(status: int) -> int:
    """The exit status that a shell gives for a status of waitpid(): 128 + n for signal n."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def signal_name(number: int) -> str:
    """For example "signal 9 (SIGKILL)"."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def in_words(status: int) -> str:
    """How a rank ended, as the end of a sentence.

    Args:
        status: as waitpid() gives it.
    """
    if not os.WIFSIGNALED(status):
        code = exit_status(status)
        hint = "; Open MPI does that when the connection to another rank breaks" if code == CONNECTION_BROKE else ""
        return f"failed with exit status {code}{hint}"
    number = os.WTERMSIG(status)
    hint = "; a machine that runs out of memory does that" if number == signal.SIGKILL else ""
    return f"was killed by {signal_name(number)}{hint}"


def without_repetition(text: str) -> str:
    """The text with each prefix once. JAX repeats "INTERNAL: Error dispatching computation: " per failed program."""
    return re.sub(r"(\b(?:[A-Z_]+: )?[^:\n]{10,100}: )\1+", r"\1", text)


def shortened(error: str) -> str:
    """The first line of an error, of at most about `LONGEST_ERROR` characters: its begin and its end.

    If it ends with a colon, such as TensorFlow's "in user code:", the last line says what was wrong.
    """
    first, *rest = without_repetition(error.strip()).split("\n")
    if first.endswith(":") and rest:
        first = f"{first} {rest[-1].strip()}"
    half = LONGEST_ERROR // 2
    return first if len(first) <= LONGEST_ERROR else f"{first[:half]} ... {first[-half:]}"
