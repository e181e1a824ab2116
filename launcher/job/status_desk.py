"""The launcher's answer to `horovodish status`: it listens in the run's folder, and asks all supervisors."""

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horovodish.launcher.job.listener import Acceptor, unix_listener
from horovodish.launcher.supervisor.supervisor import user_of

SOCKET = "status.socket"
"""In the folder of a run, which only its user can enter."""
DESCRIPTION = "status.json"
"""Beside it: the launcher's process and the command of the ranks, so that a job can be chosen before it is asked."""
ANSWER_SECONDS = {"status": 0.7, "stacks": 6.0}
"""How long the supervisors may take, by the question. They give their ranks less."""
MOST_SILENT = 16
"""How many connections may ask nothing. One more, and the oldest of them is closed."""
MOST_WAITING = 128
"""How many connections may wait in the kernel. One more is told at once that the launcher does not answer."""


@dataclass
class _Visit:
    """One question, and the answers of the supervisors so far, by rank."""

    connection: socket.socket
    question: str
    ends_at: float
    answers: dict[int, Mapping[str, Any]] = field(default_factory=dict)


class StatusDesk:
    """Answers who asks, without ever waiting for anybody.

    Args:
        selector: that the launcher waits with.
        folder: of the run.
        command: of the ranks.
        ask: asks the supervisors of all ranks; is given a number, and "status" or "stacks".
        describe: what the launcher itself knows.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        folder: Path,
        command: Sequence[str],
        ask: Callable[[int, str], None],
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self._selector = selector
        self._ask = ask
        self._describe = describe
        self._silent: list[socket.socket] = []  # have asked nothing so far, oldest first
        self._visits: dict[int, _Visit] = {}
        self._last = 0
        (folder / DESCRIPTION).write_text(json.dumps({"process": os.getpid(), "command": list(command)}))
        self._acceptor = Acceptor(selector, [unix_listener(str(folder / SOCKET), MOST_WAITING)], self._admit)

    def close(self) -> None:
        """Lets nobody ask any more."""
        while self._silent:
            self._take_leave(self._silent[0])
        for visit in self._visits.values():
            visit.connection.close()
        self._visits.clear()
        self._acceptor.close()

    def take(self, rank: int, answer: str) -> tuple[int, str]:
        """Notes the message `status` of a supervisor. Returns the process of its rank and its state."""
        number, process, state, kib, page, text = answer.split(" ", 5)
        visit = self._visits.get(int(number))
        if visit is not None:
            known = {"process": int(process), "state": state, "memory_kib": int(kib), "page": page, "answer": text}
            visit.answers[rank] = known
        return int(process), state

    def turn(self, expected: int) -> None:
        """Answers those for whom as many supervisors have answered, or whose time is over."""
        self._acceptor.resume()
        now = time.monotonic()
        for number, visit in list(self._visits.items()):
            if len(visit.answers) >= expected or now >= visit.ends_at:
                del self._visits[number]
                self._finish(visit)

    @property
    def due_seconds(self) -> float:
        """How long the launcher may wait for something else."""
        ends = (visit.ends_at for visit in self._visits.values())
        return max(0.0, min(ends, default=float("inf")) - time.monotonic())

    def _admit(self, connection: socket.socket, _: object) -> None:
        if user_of(connection) != os.geteuid():
            connection.close()
            return
        if len(self._silent) == MOST_SILENT:
            self._take_leave(self._silent[0])
        self._silent.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._take_question(connection))

    def _take_leave(self, connection: socket.socket) -> None:
        self._silent.remove(connection)
        self._selector.unregister(connection)
        connection.close()

    def _take_question(self, connection: socket.socket) -> None:
        if connection not in self._silent:
            return  # it was sent away in this turn of the selector
        try:
            question = connection.recv(64).decode(errors="replace")
        except OSError:
            question = ""
        if question not in ANSWER_SECONDS:
            self._take_leave(connection)
            return
        self._silent.remove(connection)
        self._selector.unregister(connection)
        self._last += 1
        self._visits[self._last] = _Visit(connection, question, time.monotonic() + ANSWER_SECONDS[question])
        self._ask(self._last, question)

    def _finish(self, visit: _Visit) -> None:
        """Sends a file, which takes no time, however slowly it is read."""
        known = self._describe()
        for rank in known["ranks"]:
            rank.update(visit.answers.get(rank["rank"], {}))
        with visit.connection, contextlib.suppress(OSError):  # whoever asked is gone, or no more files can be open
            file = os.memfd_create("horovodish-status")
            try:
                os.write(file, json.dumps(known).encode())
                socket.send_fds(visit.connection, [b"status"], [file])
            finally:
                os.close(file)
