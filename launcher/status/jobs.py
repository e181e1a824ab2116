"""Find the running jobs of this user on this host, and ask their launchers."""

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovodish.errors import LaunchError
from horovodish.launcher.job.status_desk import ANSWER_SECONDS, SOCKET
from horovodish.launcher.status.answers import RankStatus, printable
from horovodish.launcher.supervisor.supervisor import script_of, stat_of

PATIENCE_SECONDS = 2.0
"""How much longer than its supervisors a launcher may take, on a busy machine."""
_UNIX_SOCKETS = Path("/proc/net/unix")


@dataclass(frozen=True)
class JobStatus:
    """A launcher's answer.

    Attributes:
        process: of the launcher.
        command: what each rank runs. Empty if the launcher does not answer.
        is_stopped: whether the launcher does not answer because it is stopped.
        awaited: what has to come before the ranks can be started; empty if they are.
        is_ending: whether the launcher ends the ranks.
        waits: who waits outside of collectives, for how many seconds and for whom.
        ranks: all ranks, in order.
        at_seconds: when it was answered, by `time.monotonic()`.
    """

    process: int
    command: tuple[str, ...] = ()
    is_stopped: bool = False
    awaited: str = ""
    is_ending: bool = False
    waits: tuple[tuple[float, str], ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    at_seconds: float = 0.0

    @staticmethod
    def of(process: int, known: dict[str, Any]) -> "JobStatus":
        """Reads the answer of a launcher."""
        ranks = sorted((RankStatus.of(each) for each in known["ranks"]), key=lambda rank: rank.rank)
        waits = tuple((float(seconds), str(text)) for seconds, text in known["waits"])
        awaited, is_ending = known["awaited"], known["is_ending"]
        command, at = tuple(known["command"]), time.monotonic()
        return JobStatus(process, command, False, awaited, is_ending, waits, tuple(ranks), at)

    @staticmethod
    def of_silent(process: int) -> "JobStatus":
        """The status of a job whose launcher does not answer."""
        return JobStatus(process, is_stopped=stat_of(process)[0] in "Tt")

    @property
    def name(self) -> str:
        """The script, or else the program, without its folder."""
        words = [*self.command]
        return printable(os.path.basename(script_of(words) or words[0])) if words else ""


def ask(job: str, question: str) -> list[JobStatus]:
    """Asks the launchers of this user on this host.

    Args:
        job: the process or the name of the job. Empty: all jobs.
        question: "status" or "stacks".

    Returns:
        The answers by process. An elastic job gives two while it starts new ranks: the ranks that train come first.

    Raises:
        LaunchError: there is no such job.
    """
    of = {int(job)} if job.isdecimal() else None
    answers = _answers(_sockets(), "status", of) or _answers(_sockets(), "status")
    chosen = [each for each in answers if job in ("", str(each.process), each.name, each.name.removesuffix(".py"))]
    if chosen and question != "status":  # no other job is to take stacks
        chosen = _answers(_sockets(), question, {each.process for each in chosen})
    if chosen:
        return chosen
    here = f"of user {os.geteuid()} on {socket.gethostname()}"
    if not answers:
        raise LaunchError(f"no job {here} runs. Remedy: ask on the host where `horovodish run` was started")
    running = ", ".join(f"{each.process} {each.name}".strip() for each in answers)
    raise LaunchError(f"there is no job {job} {here}; running: {running}")


def _sockets() -> list[str]:
    """The sockets of this user's launchers. The kernel's list has those that live, whatever TMPDIR each has."""
    lines = _UNIX_SOCKETS.read_text(errors="surrogateescape").splitlines()
    paths = {fields[7] for fields in (line.split(None, 7) for line in lines) if len(fields) == 8}
    found = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):  # it is in a folder of another user's
            folder, name = os.path.split(path)
            is_run = name == SOCKET and os.path.basename(folder).startswith("horovodish-")
            if is_run and os.stat(path).st_uid == os.geteuid():
                found.append(path)
    return found


def _answers(paths: Sequence[str], question: str, of: Container[int] | None = None) -> list[JobStatus]:
    """Of all launchers, or of these processes alone."""
    with contextlib.ExitStack() as opened:
        asked: dict[socket.socket, int] = {}
        answers = []
        for path in paths:
            with contextlib.suppress(OSError):  # the job has ended meanwhile
                launcher = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                launcher.setblocking(False)
                launcher.connect(path)
                process = int.from_bytes(launcher.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], "little")
                if of is not None and process not in of:
                    continue
                if (silent := JobStatus.of_silent(process)).is_stopped:
                    answers.append(silent)
                else:
                    launcher.send(question.encode())
                    asked[launcher] = process
        ends_at = time.monotonic() + ANSWER_SECONDS[question] + PATIENCE_SECONDS
        while asked:
            ready, _, _ = select.select(list(asked), [], [], max(0.0, ends_at - time.monotonic()))
            for launcher in ready:
                process = asked.pop(launcher)
                if known := _answer_of(launcher):
                    answers.append(JobStatus.of(process, known))
            if not ready:
                answers += map(JobStatus.of_silent, asked.values())
                break
    return sorted(answers, key=lambda each: (each.process, -sum(rank.has_page for rank in each.ranks)))


def _answer_of(launcher: socket.socket) -> dict[str, Any] | None:
    """The answer, which is in a file. None if the job has ended."""
    try:
        _, files, _, _ = socket.recv_fds(launcher, 64, 1)
    except OSError:
        return None
    if not files:
        return None
    with open(files[0], "rb") as file:
        file.seek(0)
        known: dict[str, Any] = json.load(file)
        return known
