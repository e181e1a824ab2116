"""The hosts of an elastic job, which come and go: a program that prints them, or a hostfile that is looked at."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping

from horovodish.errors import SettingError
from horovodish.launcher.hosts.allocation import Allocation, allocation, from_hostfile, hosts_of

LOOK_SECONDS = 1.0
"""How often to look."""
PROGRAM_SECONDS = 10.0
"""How long the program may take."""


class Discovery:
    """Looks for hosts in a thread. What it cannot read changes nothing.

    Args:
        look: returns the hosts, or raises SettingError.

    Attributes:
        problem: why it could not read the hosts when it looked last; empty if it could.
    """

    def __init__(self, look: Callable[[], Allocation | None]) -> None:
        self.problem = ""
        self._look = look
        self._found: Allocation | None = None
        self._has_looked = threading.Event()
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="horovodish-discovery", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def found(self) -> Allocation | None:
        """The hosts that there were last; None without any. The first call waits until it has looked once."""
        self._has_looked.wait(PROGRAM_SECONDS + LOOK_SECONDS)
        return self._found

    def stop(self) -> None:
        """Ends the thread."""
        self._stops.set()
        self._thread.join(PROGRAM_SECONDS)

    def _go_on(self) -> None:
        while not self._stops.is_set():
            try:
                self._found = self._look()
                self.problem = ""
            except SettingError as error:
                self.problem = str(error)
            self._has_looked.set()
            self._stops.wait(LOOK_SECONDS)


def by_program(program: str, slots: int, environ: Mapping[str, str]) -> Callable[[], Allocation | None]:
    """Looks for hosts with a program that prints them, one in each line, as in a hostfile.

    Args:
        program: its path.
        slots: of a host without a number of them.
        environ: its variables.
    """
    source = f"--host-discovery-script {program}"

    def look() -> Allocation | None:
        hosts = hosts_of(_output_of(program, source, environ), source, slots)
        names = [host.name for host in hosts]
        if twice := {name for name in names if names.count(name) > 1}:
            raise SettingError(f"{source} names {min(twice)} more than once")
        return allocation(hosts, source) if hosts else None

    return look


def by_hostfile(path: str) -> Callable[[], Allocation | None]:
    """Looks for hosts in a hostfile.

    Args:
        path: of the file.
    """
    return lambda: from_hostfile(path)


def _output_of(program: str, source: str, environ: Mapping[str, str]) -> str:
    try:
        process = subprocess.Popen(
            [program],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as problem:
        raise SettingError(f"{source} cannot be run: {problem.strerror}") from problem
    try:
        output, errors = process.communicate(timeout=PROGRAM_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()  # a process that it has started in a session of its own may keep the other end
        process.wait()
        raise SettingError(f"{source} took more than {PROGRAM_SECONDS:.0f} s and was killed") from None
    if process.returncode != 0:
        reason = errors.strip().rpartition("\n")[2]
        raise SettingError(f"{source} failed with exit status {process.returncode}" + (f": {reason}" if reason else ""))
    return output
