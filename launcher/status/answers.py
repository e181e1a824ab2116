"""A rank's own report, and its supervisor's facts about it."""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_PAGE = struct.Struct("=QQQQq16s200s")
"""StatusPage in horovodish/csrc/engine/status_page.h."""
_UNNAMED = ".noname."
CLOSED = "closed\n"
"""As the supervisor says it."""
_FRAMELESS = re.compile(r"Thread 0x[^\n]*\n  <no Python frame>\n\n?")
"""Among the stacks: a thread of native code, such as the one that holds Python's lock meanwhile."""


@dataclass(frozen=True)
class Wait:
    """An operation that a rank has under way.

    Attributes:
        process_set: its number.
        seconds: for how long.
        name: its name, the same on all ranks.
        call: what messages call it, such as "allreduce 'loss'".
        is_decided: whether every rank has called it.
    """

    process_set: int
    seconds: float
    name: str
    call: str
    is_decided: bool = False


@dataclass(frozen=True)
class Pending:
    """The view that the root of a process set has of a collective that not all ranks have called.

    Attributes:
        process_set, seconds, name, call: as of a `Wait`.
        submitted: the ranks that have called it.
        missing: those that have not, as far as the root has heard.
    """

    process_set: int
    seconds: float
    name: str
    call: str
    submitted: frozenset[int]
    missing: frozenset[int]


@dataclass(frozen=True)
class OnGpu:
    """The operation that a GPU has to end next.

    Attributes:
        process_set, name, call: as of a `Wait`.
        idle_seconds: how long the GPU has ended no operation, or has had none.
        launched_seconds: how long ago the rank launched the operation on it.
        has_started: whether the GPU has come to the operation.
    """

    process_set: int
    idle_seconds: float
    name: str
    call: str
    launched_seconds: float
    has_started: bool


@dataclass
class RankStatus:
    """A rank.

    Attributes:
        rank: its number.
        host: the name of its host.
        process: its process id there.
        phase: see `horovodish.launcher.job.waiting`.
        phase_seconds: for how long.
        supervisor: the process id of its supervisor; 0 if it is not known.
        state: the letter in /proc for the state of its process. Empty: its supervisor has not answered.
        memory_kib: what its process uses.
        has_page: whether its supervisor can read its page.
        steps, reduced_bytes: so far.
        last_call: the collective that it has called last; empty if none.
        last_call_seconds: how long ago.
        under_way: how many collectives have not ended.
        answers: whether its engine has answered.
        is_closed: whether its engine takes no questions: it has not begun, or has ended.
        does: a sentence for each process set, without a subject.
        waits: what it has under way, what has waited longest first.
        transfers: sends and receives that it waits for: the seconds, and the call.
        gpu: the operation that its GPU has to end next; None if there is none.
        pending: known to the root of a process set.
        within_bytes: what it has put into memory that the ranks of its host share; None if its engine has not answered.
        sent_bytes: what it has sent to other hosts over MPI, by the first rank of the host.
        late_seconds: by rank, how long the others have waited for it so far; known to rank 0.
        stacks: of Python; empty unless they were asked for.
    """

    rank: int
    host: str
    process: int
    phase: str | None
    phase_seconds: float
    supervisor: int = 0
    state: str = ""
    memory_kib: int = 0
    has_page: bool = False
    steps: int = 0
    reduced_bytes: int = 0
    last_call: str = ""
    last_call_seconds: float = 0.0
    under_way: int = 0
    answers: bool = False
    is_closed: bool = False
    does: list[str] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    transfers: list[tuple[float, str]] = field(default_factory=list)
    gpu: OnGpu | None = None
    pending: list[Pending] = field(default_factory=list)
    within_bytes: int | None = None
    sent_bytes: dict[int, int] = field(default_factory=dict)
    late_seconds: dict[int, float] = field(default_factory=dict)
    stacks: str = ""

    @staticmethod
    def of(known: Mapping[str, Any]) -> "RankStatus":
        """Reads what the launcher says of a rank."""
        status = RankStatus(known["rank"], known["host"], known["process"], known["phase"], known["phase_seconds"])
        status.supervisor = known.get("supervisor", 0)  # a launcher of an older version does not say it
        status.state, status.memory_kib = known.get("state", ""), known.get("memory_kib", 0)
        status._read_page(known.get("page", "-"))
        answer, _, stacks = printable(known.get("answer", "")).partition("stacks\n")
        status.stacks = _FRAMELESS.sub("", stacks)
        status.is_closed = answer.startswith(CLOSED)
        for line in answer.removeprefix(CLOSED).splitlines():
            status._read_line(line.split("\t"))
        status.waits.sort(key=lambda wait: -wait.seconds)
        return status

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self.phase == "" or self.state in ("Z", "X")

    @property
    def is_stopped(self) -> bool:
        """Whether its process is stopped, by a signal or a debugger."""
        return self.state in ("T", "t")

    @property
    def is_mute(self) -> bool:
        """Whether it should answer and does not: its engine is stuck, its supervisor, or its host."""
        is_up = self.phase in ("running", "training") and self.has_page and not self.is_closed
        return not self.has_ended and not self.is_stopped and (not self.state or (is_up and not self.answers))

    @property
    def waited(self) -> tuple[float, str]:
        """The seconds that the rank or its GPU has waited for others, and the call. If neither waits: 0 and no call."""
        found = [*((wait.seconds, wait.call) for wait in self.waits), *self.transfers]
        if self.gpu and self.gpu.has_started:
            found.append((self.gpu.idle_seconds, self.gpu.call))
        return max(found, default=(0.0, ""))

    def _read_page(self, page: str) -> None:
        now_ns, _, digits = page.partition(":")
        content = bytes.fromhex(digits)
        self.has_page = len(content) == _PAGE.size
        if not self.has_page:
            return
        self.steps, self.reduced_bytes, submitted, ended, at_ns, kind, name = _PAGE.unpack(content)
        self.under_way = submitted - ended
        if submitted:
            texts = (printable(text.partition(b"\0")[0].decode(errors="replace")) for text in (kind, name))
            self.last_call = _call_of(*texts)
            self.last_call_seconds = (int(now_ns) - at_ns) / 1e9

    def _read_line(self, fields: list[str]) -> None:
        match fields:
            case ["engine"]:
                self.answers = True
            case ["does", _, text]:
                self.does.append(text)
            case ["waits" | "executes" as how, process_set, seconds, name, call]:
                self.waits.append(Wait(int(process_set), float(seconds), name, call, how == "executes"))
            case ["transfer", _, text]:
                call, _, seconds = text.rpartition(", for ")
                self.transfers.append((float(seconds.removesuffix(" s")), call))
            case ["gpu", process_set, idle, name, call, launched, how]:
                self.gpu = OnGpu(int(process_set), float(idle), name, call, float(launched), how == "started")
            case ["missing", process_set, seconds, name, call, submitted, missing]:
                ranks = frozenset(_ranks_in(submitted)), frozenset(_ranks_in(missing))
                self.pending.append(Pending(int(process_set), float(seconds), name, call, *ranks))
            case ["within", size]:
                self.within_bytes = int(size)
            case ["sent", rank, size]:
                self.sent_bytes[int(rank)] = int(size)
            case ["late", rank, seconds]:
                self.late_seconds[int(rank)] = float(seconds)


def printable(text: str) -> str:
    """The text without what would control a terminal: scripts choose names."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text)


def _call_of(kind: str, name: str) -> str:
    if _UNNAMED not in name:
        return f"{kind} '{name}'"
    number = re.match(r"\d+", name.partition(_UNNAMED)[2])
    return f"call {number[0]} of {kind}" if number else kind


def _ranks_in(text: str) -> Iterator[int]:
    """The ranks of a text such as "ranks 0-2, 5"."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)
