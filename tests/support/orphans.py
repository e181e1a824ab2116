"""What the tests have started ends with their process, however that ends: `python orphans.py PID MARK`.

That program waits beside the tests, in a session of its own. When they are gone, it ends every process that inherited
their mark and removes the folders that bear it. After tests that ended by themselves, it finds none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "STARTED_BY_TESTS"
MEMORY = "/dev/shm"

_GRACE_SECONDS = 3.0
"""How long mpirun and the launcher may take to end their ranks and to remove their files."""

_KILL_SECONDS = 60.0
_PAUSE_SECONDS = 0.05
_beside_this_process: list[subprocess.Popen[bytes]] = []


@functools.cache
def mark_of_this_process() -> str:
    """Marks all that this process starts from now on, so that it ends with this process.

    Returns:
        What the names of folders that shall go, too, begin with: in the folder for temporary files and in `MEMORY`.
    """
    mark = f"ranks-{uuid.uuid4().hex[:12]}-"
    unmarked = {name: value for name, value in os.environ.items() if name != VARIABLE}
    nothing = subprocess.DEVNULL
    command = [sys.executable, __file__, str(os.getpid()), mark]
    # Python would warn of a running process that nobody refers to.
    _beside_this_process.append(
        subprocess.Popen(command, env=unmarked, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    )
    os.environ[VARIABLE] = mark
    return mark


def main(tests: int, mark: str) -> None:
    wait_for_end_of_parent(tests)
    end_processes(mark)
    for place in (tempfile.gettempdir(), MEMORY):
        for folder in Path(place).glob(f"{mark}*"):
            shutil.rmtree(folder, ignore_errors=True)


def wait_for_end_of_parent(pid: int) -> None:
    """A descriptor of it would be inherited by what it forks, and the signal on its death depends on its thread."""
    with contextlib.suppress(ProcessLookupError):
        file = os.pidfd_open(pid)
        if os.getppid() == pid:  # and no later process of that number
            select.select([file], [], [])


def end_processes(mark: str) -> None:
    """First as a user would, by ending what has started the others, then all that is left."""
    found = processes_with(VARIABLE, mark)
    for pid in found:
        if parent(pid) not in found:
            send(pid, signal.SIGTERM)
            send(pid, signal.SIGCONT)
    for _ in looks(_GRACE_SECONDS):
        if not processes_with(VARIABLE, mark):
            return
    for _ in looks(_KILL_SECONDS):
        found = processes_with(VARIABLE, mark)
        if not found:
            return
        for pid in found:
            send(pid, signal.SIGKILL)


def processes_with(variable: str, value: str) -> dict[int, str]:
    """The processes, with their command lines, that were started with this in their environment and have not ended."""
    line = f"{variable}={value}".encode()
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if line in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(process.name)] = command.decode(errors="replace")
    return found


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def looks(seconds: float) -> Iterator[None]:
    """Once at least, and then again and again for so long."""
    ends_at = time.monotonic() + seconds
    yield
    while time.monotonic() < ends_at:
        time.sleep(_PAUSE_SECONDS)
        yield


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
