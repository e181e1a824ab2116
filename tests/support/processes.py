"""Ranks that stop and continue each other, and wait for each other's end, without guessing how long that takes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import horovodish as hvd

_POLL_SECONDS = 0.005
_LIMIT_SECONDS = 60.0


def all_pids() -> list[int]:
    """The process id of every rank; every rank must call it."""
    return hvd.allgather(np.array([os.getpid()]), name="process ids").tolist()


def meet() -> None:
    """A barrier of all ranks on this host, and nobody returns before everybody has left it: now a rank may die."""
    hvd.barrier()
    files = [output_of(rank).with_suffix(".met") for rank in range(hvd.size())]
    with files[hvd.rank()].open("ab") as own:
        own.write(b".")
    wait_until(lambda: all(_length(file) >= _length(files[hvd.rank()]) for file in files))


def _length(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def stop(pid: int) -> None:
    """Sends SIGSTOP and waits until the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until_state(pid, "T")


def resume(pid: int) -> None:
    """Sends SIGCONT."""
    os.kill(pid, signal.SIGCONT)


def is_stopped(pid: int) -> bool:
    """Whether it is stopped now."""
    return _state(pid) == "T"


def wait_until_ended(pid: int) -> None:
    """Waits for the end of a process, which may stay behind as a zombie."""
    wait_until_state(pid, "ZX")


def wait_until_state(pid: int, states: str) -> None:
    """Waits until /proc gives one of these letters for the process; a process that is not there any more has "X"."""
    ends_at = time.monotonic() + _LIMIT_SECONDS
    while _state(pid) not in states:
        assert time.monotonic() < ends_at, f"process {pid} is in state {_state(pid)} and not in any of {states}"
        time.sleep(_POLL_SECONDS)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "X"


def wait_until(true: Callable[[], bool]) -> None:
    """Waits until a function of this process gives True."""
    ends_at = time.monotonic() + _LIMIT_SECONDS
    while not true():
        assert time.monotonic() < ends_at, f"{true} does not become true"
        time.sleep(_POLL_SECONDS)


def output_of(rank: int) -> Path:
    """The file of what a rank of this host prints."""
    return Path(os.readlink("/proc/self/fd/2")).with_name(f"{rank}.output")


def wait_for_output(rank: int, text: str) -> str:
    """Waits until a rank of this host has printed a text; returns all that it has printed so far."""
    output = output_of(rank)
    ends_at = time.monotonic() + _LIMIT_SECONDS
    while text not in output.read_text():
        assert time.monotonic() < ends_at, f"rank {rank} did not print {text!r}"
        time.sleep(_POLL_SECONDS)
    return output.read_text()
