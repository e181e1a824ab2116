"""Finds out why hosts are silent: runs `true` there in the same way that mpirun starts daemons there."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO

from horovodish.launcher.mpirun.messages import reason_of_absence

REACH_SECONDS = 12.0
"""How long the command may take. ssh gives up a connection after 10 seconds."""
LOOK_SECONDS = 0.1
MOST_TRIED = 16
"""Where more hosts are absent, the first ones show the reason."""
BLOCKED = (
    "a firewall may block it (docs/clusters.md lists the ports), or it takes the wrong network "
    "(--network-interfaces chooses one)"
)


def reasons_of_absence(
    hosts: Iterable[str],
    agent: Sequence[str],
    environ: Mapping[str, str],
    *,
    was_late: bool,
    is_over: Callable[[], bool],
) -> dict[str, str]:
    """Why these hosts are absent, as far as the command tells. Blocks for `REACH_SECONDS` at most.

    Args:
        hosts: their names.
        agent: the program that starts daemons there, with its flags.
        environ: its variables.
        was_late: whether mpirun was still waiting for its daemons when the time was over.
        is_over: whether nobody wants to know any more.
    """
    with contextlib.ExitStack() as opened:
        tried: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        for host in list(hosts)[:MOST_TRIED]:
            said = opened.enter_context(tempfile.TemporaryFile())
            command = [*agent, host, "true"]
            with contextlib.suppress(OSError):  # mpirun has said that it cannot be run
                tried[host] = _started(command, environ, said), said
        give_up_at = time.monotonic() + REACH_SECONDS
        while any(process.poll() is None for process, _ in tried.values()):
            if time.monotonic() > give_up_at or is_over():
                break
            time.sleep(LOOK_SECONDS)
        return {host: _reason(host, agent[0], _end(process), said, was_late) for host, (process, said) in tried.items()}


def _started(command: Sequence[str], environ: Mapping[str, str], said: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
    )


def _end(process: "subprocess.Popen[bytes]") -> int | None:
    """The exit status; None if the process had to be killed."""
    if (status := process.poll()) is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status


def _reason(host: str, agent: str, status: int | None, said: IO[bytes], was_late: bool) -> str:
    command = f"`{os.path.basename(agent)} {host} true`"
    said.seek(0)
    text = said.read().decode(errors="replace").strip()
    if status == 0:
        return f"{command} works, but MPI's daemon there did not connect back: {BLOCKED}" if was_late else ""
    if status is None:
        return f"{command} did not end within {REACH_SECONDS:.0f} s"
    last = text.rpartition("\n")[2]
    return reason_of_absence(host, text) or f"{command} fails with exit status {status}" + (f": {last}" if last else "")
