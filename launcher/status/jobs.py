"""Find the running jobs of this user on this host, and ask their launchers."""

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovodish.errors import LaunchError
from horovodish.launcher.job.status_desk import ANSWER_SECONDS, DESCRIPTION, SOCKET
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
        command: what each rank runs.
        answers: whether the launcher has answered.
        is_stopped: whether the launcher has not answered because it is stopped.
        awaited: what has to come before the ranks can be started; empty if they are.
        is_ending: whether the launcher ends the ranks.
        waits: who waits outside of collectives, for how many seconds and for whom.
        ranks: all ranks, in order.
        at_seconds: when it was answered, by `time.monotonic()`.
    """

    process: int
    command: tuple[str, ...]
    answers: bool = True
    is_stopped: bool = False
    awaited: str = ""
    is_ending: bool = False
    waits: tuple[tuple[float, str], ...] = ()
    ranks: tuple[RankStatus, ...] = ()
    at_seconds: float = 0.0

    def answered(self, known: dict[str, Any]) -> "JobStatus":
        """The status of the job by the answer of its launcher."""
        ranks = sorted((RankStatus.of(each) for each in known["ranks"]), key=lambda rank: rank.rank)
        waits = tuple((float(seconds), str(text)) for seconds, text in known["waits"])
        awaited, is_ending = known["awaited"], known["is_ending"]
        at = time.monotonic()
        return JobStatus(self.process, self.command, True, False, awaited, is_ending, waits, tuple(ranks), at)

    @property
    def name(self) -> str:
        """The script, or else the program, without its folder."""
        words = [*self.command]
        return printable(os.path.basename(script_of(words) or words[0]))

    def is_called(self, job: str) -> bool:
        """Whether these words of a user mean this job."""
        return job in ("", str(self.process), self.name, self.name.removesuffix(".py"))


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
    running = {path: its for path in _sockets() if (its := _described(path))}
    if answers := _answers({path: its for path, its in running.items() if its.is_called(job)}, question):
        return answers
    here = f"of user {os.geteuid()} on {socket.gethostname()}"
    if not running:
        raise LaunchError(f"no job {here} runs. Remedy: ask on the host where `horovodish run` was started")
    names = ", ".join(f"{each.process} {each.name}" for each in running.values())
    raise LaunchError(f"there is no job {job} {here}; running: {names}")


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


def _described(path: str) -> JobStatus | None:
    """The job of a socket, before its launcher has answered. None if the job has ended."""
    try:
        known = json.loads(Path(path).with_name(DESCRIPTION).read_text())
        is_stopped = stat_of(known["process"])[0] in "Tt"
    except (OSError, ValueError):  # the job has ended meanwhile
        return None
    return JobStatus(known["process"], tuple(known["command"]), False, is_stopped)


def _answers(jobs: Mapping[str, JobStatus], question: str) -> list[JobStatus]:
    """The answers of the launchers of these jobs, by the paths of their sockets."""
    with contextlib.ExitStack() as opened:
        asked: dict[socket.socket, JobStatus] = {}
        answers = []
        for path, job in jobs.items():
            launcher = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            launcher.setblocking(False)
            try:
                if not job.is_stopped:
                    launcher.connect(path)
                    launcher.send(question.encode())
                    asked[launcher] = job
                    continue
            except BlockingIOError:  # many have asked already
                pass
            except OSError:  # the job has ended meanwhile
                continue
            answers.append(job)
        ends_at = time.monotonic() + ANSWER_SECONDS[question] + PATIENCE_SECONDS
        while asked:
            ready, _, _ = select.select(list(asked), [], [], max(0.0, ends_at - time.monotonic()))
            for launcher in ready:
                job = asked.pop(launcher)
                if known := _answer_of(launcher):
                    answers.append(job.answered(known))
            if not ready:
                answers += asked.values()
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
