"""The mpirun of a run: how it is started, what it says, and how it ends."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovodish.errors import LaunchError

PATIENCE_SECONDS = 3.0
"""How long mpirun may take to end after all ranks have ended."""


class MpirunProcess:
    """The mpirun that starts the supervisors.

    Args:
        command: the command.
        folder: of the run.

    Attributes:
        command: as given.
        status: its exit status, negative for a signal.
        was_killed: whether a signal that the launcher did not send ended it.
        was_told: whether the launcher had to send it a signal.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.command = command
        self.status = 0
        self.was_killed = self.was_told = False
        # It has no name: a supervisor that has lost its link may remove the folder before the last words are said.
        self._log = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, `end()` closes it
        self._last_words = ""

    @property
    def said(self) -> str:
        """The output of mpirun itself so far."""
        if self._log.closed:
            return self._last_words
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace").replace("\0", "")

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def start(self, environ: Mapping[str, str]) -> None:
        """Starts it.

        Args:
            environ: its variables.

        Raises:
            LaunchError: it cannot be started.
        """
        try:
            self._process = subprocess.Popen(
                self.command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # signals from the terminal reach the ranks through the launcher alone
            )
        except OSError as failure:
            self._log.close()
            raise LaunchError(f"the ranks cannot be started: {failure}") from failure

    def end(self, *, at_once: bool) -> None:
        """Waits for its end, and brings it about if it does not come. Called once.

        Args:
            at_once: whether it would not end by itself.
        """
        patience = 0.0 if at_once else PATIENCE_SECONDS
        for number, seconds in ((None, patience), (signal.SIGTERM, 1.0), (signal.SIGKILL, None)):
            if number is not None:
                self.was_told = True
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.status = self._process.wait(seconds)
                self.was_killed = not self.was_told and self.status < 0
                break
        self._last_words = self.said
        self._log.close()
