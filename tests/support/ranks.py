"""`run_ranks`: run a function on several real ranks, and show what each of them did when one does not succeed."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.mpi_command import is_open_mpi, mpi_command, mpi_environment
from support.outcome import Outcome

GRACE_SECONDS = 2.0
"""How long the other ranks may go on after the first failure, so that they can fail for reasons of their own."""

_POLL_SECONDS = 0.02
_STACK_SECONDS = 0.5
_MARK = "RANKS_OF_TEST_RUN"
_TESTS = Path(__file__).parent.parent
_SHOWN_CHARACTERS = 6000


class RanksFailedError(AssertionError):
    """At least one rank did not return; the message shows how every rank ended and what it printed.

    Attributes:
        outcomes: how each rank ended, by rank.
    """

    def __init__(self, message: str, outcomes: list[Outcome]):
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(
    function: Callable[..., Any],
    np: int,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    command: list[str] | None = None,
) -> list[Any]:
    """Call `function(*args)` on `np` fresh processes that MPI starts, and give the results by rank.

    Args:
        function: of module level; each rank imports its file anew. It calls `init()` itself; `shutdown()` follows by
            itself, and a thread or shared memory of the engine that survives it fails the rank.
        np: the number of ranks.
        args: what to call it with; anything that can be pickled.
        timeout: seconds until the ranks that still run count as hung.
        env: variables to set in the ranks besides those of this process.
        command: starts `np` times the program that is appended to it; MPI's launcher when not given.

    Returns:
        What the function returned, by rank; anything that can be pickled.

    Raises:
        RanksFailedError: a rank raised, died or hung. The others are ended `GRACE_SECONDS` later.
        AssertionError: a process or shared memory was left behind.
    """
    run = _Run(function, np, args, env or {}, command or mpi_command(np, survivors=False), stops_at_failure=True)
    outcomes = run.outcomes(timeout)
    if any(outcome.ended != "returned" for outcome in outcomes):
        raise RanksFailedError(_report(function.__name__, outcomes, run.mpi_output), outcomes)
    return [outcome.result for outcome in outcomes]


def run_ranks_to_their_ends(
    function: Callable[..., Any],
    np: int,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    command: list[str] | None = None,
) -> list[Outcome]:
    """As `run_ranks`, but a rank that fails does not end the others: for tests of what survivors see.

    Skips the test over MPICH, whose mpiexec ends all ranks when one of them dies.

    Returns:
        How each rank ended, by rank.
    """
    if not is_open_mpi():
        pytest.skip("MPICH's mpiexec ends all ranks when one of them dies")
    command = command or mpi_command(np, survivors=True)
    return _Run(function, np, args, env or {}, command, stops_at_failure=False).outcomes(timeout)


class _Run:
    def __init__(
        self,
        function: Callable[..., Any],
        np: int,
        args: tuple[Any, ...],
        env: Mapping[str, str],
        command: list[str],
        stops_at_failure: bool,
    ):
        if "<locals>" in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not of module level, so no other process can find it")
        self._np = np
        self._stops_at_failure = stops_at_failure
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._path = Path(self._folder.name)
        self._segments_before = _shared_memory()
        call = {
            "path": inspect.getfile(function),
            "module": function.__module__,
            "qualname": function.__qualname__,
            "args": args,
        }
        (self._path / "call").write_bytes(pickle.dumps(call))
        rank_main = Path(__file__).with_name("rank_main.py")
        program = [sys.executable, str(rank_main), str(self._path), "stop" if stops_at_failure else "go-on"]
        environment = {**mpi_environment(), "PYTHONPATH": str(_TESTS), **env, _MARK: self._mark}
        # A killed mpirun leaves its session folder behind, and a later one of the same process id stumbles over it.
        environment["TMPDIR"] = str(self._path)
        with (self._path / "mpi.output").open("wb") as output:
            self._mpi = subprocess.Popen(
                command + program,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def outcomes(self, timeout: float) -> list[Outcome]:
        """Waits until all ranks have ended, ends them where necessary, cleans up and says how each one ended."""
        ends_at = time.monotonic() + timeout
        failed = False
        running: set[int] = set()
        try:
            while self._mpi.poll() is None and time.monotonic() < ends_at:
                time.sleep(_POLL_SECONDS)
                if self._stops_at_failure and not failed and self._has_failed():
                    failed = True
                    ends_at = min(ends_at, time.monotonic() + GRACE_SECONDS)
                if failed and all(self._told(rank) for rank in range(self._np)):
                    break
            if self._mpi.poll() is None:
                running = {rank for rank in range(self._np) if self._runs(rank)}
                self._show_stacks(running)
        finally:
            left = self._end_all()
        self.mpi_output = self._text("mpi.output")
        outcomes = [self._outcome(rank, failed, rank in running) for rank in range(self._np)]
        self._folder.cleanup()
        segments = _shared_memory() - self._segments_before
        assert not left, f"processes left behind: {left}"
        assert not segments, f"shared memory left behind: {segments}"
        return outcomes

    def _has_failed(self) -> bool:
        """Whether a rank has raised, or has died without a word."""
        for rank in range(self._np):
            told = self._told(rank)
            if told is None and self._text(f"{rank}.pid") and not self._runs(rank):
                told = self._told(rank) or {"ended": "died"}
            if told is not None and told["ended"] != "returned":
                return True
        return False

    def _outcome(self, rank: int, failed: bool, running: bool) -> Outcome:
        told = self._told(rank)
        if running and not failed:  # also after the function has returned: then the process did not end
            told = {"ended": "hung"}
        elif told is None:
            told = {"ended": "ended" if running else "died"}
        return Outcome(rank=rank, output=self._text(f"{rank}.output"), **told)

    def _runs(self, rank: int) -> bool:
        pid = self._text(f"{rank}.pid")
        return bool(pid) and _runs(int(pid))

    def _show_stacks(self, ranks: set[int]) -> None:
        """Makes the ranks write the stacks of their threads into their output, unless they only wait to be ended."""
        for rank in ranks:
            told = self._told(rank)
            if told is None or told["ended"] == "returned":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(self._text(f"{rank}.pid")), signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)

    def _end_all(self) -> list[str]:
        """Ends what the run has started and gives the command lines of what ran after mpirun had ended."""
        ended_by_itself = self._mpi.poll() is not None
        if not ended_by_itself:
            self._mpi.kill()
            self._mpi.wait()
        else:
            _wait_until(lambda: not self._marked())
        left = self._marked()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return list(left.values()) if ended_by_itself else []

    def _marked(self) -> dict[int, str]:
        """The processes, with their command lines, that carry this run's mark in their environment."""
        found = {}
        mark = f"{_MARK}={self._mark}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # ended meanwhile, or another user's
                continue
        return found

    def _told(self, rank: int) -> dict[str, Any] | None:
        path = self._path / f"{rank}.outcome"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def _text(self, name: str) -> str:
        path = self._path / name
        return path.read_text(errors="replace") if path.exists() else ""


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _wait_until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    ends_at = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends_at:
        time.sleep(_POLL_SECONDS)


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("horovodish")}


def _report(name: str, outcomes: list[Outcome], mpi_output: str) -> str:
    parts = [f"{name}: " + ", ".join(f"rank {outcome.rank} {outcome.ended}" for outcome in outcomes)]
    parts += [f"--- rank {outcome.rank} {outcome.ended}:\n{_end_of(outcome.output)}" for outcome in outcomes]
    return "\n".join([*parts, f"--- mpirun:\n{_end_of(mpi_output)}"])


def _end_of(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"... {text[-_SHOWN_CHARACTERS:]}"
