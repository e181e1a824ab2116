"""The hosts of an elastic job, which come and go: a program that prints them, or a hostfile that is looked at."""

import contextlib
import os
import selectors
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from horovodish.errors import SettingError
from horovodish.launcher.hosts.allocation import LONGEST_TEXT_BYTES, Allocation, allocation, from_hostfile, hosts_of

LOOK_SECONDS = 1.0
"""How often to look."""
PROGRAM_SECONDS = 10.0
"""How long the program may take."""
STOP_SECONDS = 1.0
"""How long the end of the thread may take. A file system that does not answer may keep it for ever."""
SLICE_SECONDS = 0.05
"""How often to look whether the program is to be ended."""

READ_BYTES = 1 << 16

Look = Callable[[threading.Event], Allocation | None]
"""Returns the hosts, or raises SettingError. It comes back early when the event is set."""


class Discovery:
    """Looks for hosts in a thread. What it cannot read changes nothing.

    Args:
        look: finds the hosts.

    Attributes:
        problem: why it could not read the hosts when it looked last; empty if it could.
    """

    def __init__(self, look: Look) -> None:
        self.problem = ""
        self._look = look
        self._found: Allocation | None = None
        self._looked = threading.Event()
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="horovodish-discovery", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def has_looked(self, within: float) -> bool:
        """Whether it has looked once. Waits for that, `within` seconds at most."""
        return self._looked.wait(within)

    def found(self) -> Allocation | None:
        """The hosts that there were last; None without any, and before it has looked."""
        return self._found

    def stop(self) -> None:
        """Ends the thread, and the program with all that it has started in its process group."""
        self._stops.set()
        self._thread.join(STOP_SECONDS)

    def _go_on(self) -> None:
        while not self._stops.is_set():
            try:
                self._found = self._look(self._stops)
                self.problem = ""
            except SettingError as error:
                self.problem = str(error)
            self._looked.set()
            self._stops.wait(LOOK_SECONDS)


def by_program(program: str, slots: int, environ: Mapping[str, str]) -> Look:
    """Looks for hosts with a program that prints them, one in each line, as in a hostfile.

    Args:
        program: its path.
        slots: of a host without a number of them.
        environ: its variables.
    """
    source = f"--host-discovery-script {program}"

    def look(stops: threading.Event) -> Allocation | None:
        hosts = hosts_of(_output_of(program, source, environ, stops), source, slots)
        names = Counter(host.name for host in hosts)
        if twice := [name for name, times in names.items() if times > 1]:
            raise SettingError(f"{source} names {min(twice)} more than once")
        return allocation(hosts, source) if hosts else None

    return look


def by_hostfile(path: str) -> Look:
    """Looks for hosts in a hostfile.

    Args:
        path: of the file.
    """
    return lambda _: from_hostfile(path)


# It reads the number of a process group, and kills the group at the end of its stdin. The end comes when the launcher
# closes the pipe, and when the launcher is killed.
_GUARD = 'read -r group; read -r _; [ -z "$group" ] || kill -9 "-$group"'
# The program begins when the guard has its number. If the launcher is killed before that, the program does not begin.
_GATE = 'read -r _ && exec "$0" </dev/null'


@contextlib.contextmanager
def _running(program: str, environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The program in a process group of its own. At the end nothing of the group is left.

    Raises:
        OSError: it cannot be started.
    """
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    guard = subprocess.Popen(["/bin/sh", "-c", _GUARD], stdin=pipe, stdout=null, stderr=null, start_new_session=True)
    assert guard.stdin
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GATE, program],
            env=dict(environ),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
    except OSError:
        guard.stdin.close()
        guard.wait()
        raise
    assert process.stdin
    try:
        for reader, line in ((guard.stdin, f"{process.pid}\n"), (process.stdin, "\n")):
            reader.write(line.encode())
            reader.flush()
        yield process
    finally:
        guard.stdin.close()
        guard.wait()
        process.wait()  # not before: the group has its number
        for file in (process.stdin, process.stdout, process.stderr):
            if file:
                file.close()


def _output_of(program: str, source: str, environ: Mapping[str, str], stops: threading.Event) -> str:
    try:
        with _running(program, environ) as process:
            output, errors, problem = _heard(process, stops)
    except OSError as failure:
        raise SettingError(f"{source} cannot be run: {failure.strerror}") from failure
    if problem:
        raise SettingError(f"{source} {problem}")
    if process.returncode != 0:
        reason = errors.strip().rpartition("\n")[2]
        raise SettingError(f"{source} failed with exit status {process.returncode}" + (f": {reason}" if reason else ""))
    return output


def _heard(process: subprocess.Popen[bytes], stops: threading.Event) -> tuple[str, str, str]:
    """A program's stdout, the end of its stderr, and why it must be killed."""
    output, errors = bytearray(), bytearray()
    problem, ends_at = "", time.monotonic() + PROGRAM_SECONDS
    with selectors.DefaultSelector() as selector:
        for file, heard in ((process.stdout, output), (process.stderr, errors)):
            assert file
            selector.register(file, selectors.EVENT_READ, heard)
        while not problem:
            has_ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ready = selector.select(0 if has_ended else SLICE_SECONDS)
            for key, _ in ready:
                if data := os.read(key.fd, READ_BYTES):
                    key.data.extend(data)
                else:
                    selector.unregister(key.fd)
            del errors[:-READ_BYTES]
            if len(output) > LONGEST_TEXT_BYTES:
                problem = f"printed more than {LONGEST_TEXT_BYTES >> 20} MiB and was killed"
            elif has_ended and not ready:
                break
            elif stops.is_set():
                problem = "was killed because the job ends"
            elif time.monotonic() > ends_at:
                problem = f"took more than {PROGRAM_SECONDS:.0f} s and was killed"
    return output.decode(errors="replace"), errors.decode(errors="replace"), problem
