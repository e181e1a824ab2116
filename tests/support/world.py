"""`World`: ranks that MPI has started and that call one function after the other, watched from outside."""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.mpi_command import mpi_environment, mpi_files_in
from support.orphans import MEMORY, mark_of_this_process, processes_with
from support.outcome import Outcome
from support.sources import STARTUP

GRACE_SECONDS = 2.0
"""How long the other ranks may go on after the first failure, so that they can fail for reasons of their own."""

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.05
_STACK_SECONDS = 0.5
_STACK_BEGINS_WITHIN_SECONDS = 5.0
_LEAVE_SECONDS = 120.0
_VANISH_SECONDS = 8.0
_MARK = "RANKS_OF_TEST_RUN"
_TESTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Call:
    """What every rank shall do.

    Attributes:
        function: of module level; each rank imports its file.
        args: what to call it with; anything that can be pickled.
        env: variables that are set meanwhile.
        begin: whether the rank calls `init()` before.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    env: Mapping[str, str]
    begin: bool

    def pickled(self) -> bytes:
        function = self.function
        where = {"path": inspect.getfile(function), "module": function.__module__, "qualname": function.__qualname__}
        return pickle.dumps({**where, "args": self.args, "env": dict(self.env), "begin": self.begin})


class World:
    """The ranks, from their start until they leave or one of them does not succeed.

    Attributes:
        size: how many ranks there are.
        is_over: whether they have ended.
        mpi_output: what mpirun has printed, once they have ended.
        mpi_status: the exit status of mpirun, once they have ended.
    """

    def __init__(self, command: list[str], size: int, env: Mapping[str, str], *, stops_at_failure: bool) -> None:
        """Starts the ranks.

        Args:
            command: starts `size` times the program that is appended to it.
            size: how many ranks there are.
            env: variables to set in the ranks besides this process's.
            stops_at_failure: whether a rank that fails ends the others.
        """
        self.size = size
        self.is_over = False
        self.mpi_output = ""
        self.mpi_status: int | None = None
        self._stops_at_failure = stops_at_failure
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix=mark_of_this_process())
        self._memory = tempfile.TemporaryDirectory(prefix=mark_of_this_process(), dir=MEMORY)
        self._path = Path(self._folder.name)
        self._pipes = [self._pipe(rank) for rank in range(size)]
        self._was_killed = False
        self._called: list[str] = []
        self._own: set[int] = set()  # the processes that run between two calls
        self._place = self._path  # where the ranks write during the call
        rank_main = Path(__file__).with_name("rank_main.py")
        program = [sys.executable, str(rank_main), str(self._path), "stop" if stops_at_failure else "go-on"]
        python_path = f"{_TESTS}{os.pathsep}{STARTUP}"
        environment = {**mpi_environment(), "PYTHONPATH": python_path, **env, _MARK: self._mark}
        # A later mpirun of the same process id would stumble over what a killed one has left elsewhere.
        environment |= mpi_files_in(self._path, Path(self._memory.name))
        with (self._path / "mpi.output").open("wb") as output:
            self._mpi = subprocess.Popen(
                command + program,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def call(self, call: Call, timeout: float, *, is_last: bool) -> list[Outcome]:
        """Has every rank do something, waits until all are done, and says how each one ended.

        Unless all have returned, it is over with them.

        Args:
            call: what to do.
            timeout: seconds until the ranks that still run count as hung.
            is_last: whether each rank leaves as soon as it is done. That it does is part of what is waited for.

        Raises:
            AssertionError: processes or shared memory were left behind, or mpirun failed though all have returned.
        """
        ends_at = time.monotonic() + timeout
        segments_before = _shared_memory()
        if not is_last and not self._called:
            self._wait_for_start(ends_at)
            self._own = set(self._marked())
        self._send(call, is_last)
        failed = self._wait(ends_at, is_last)
        goes_on = not is_last and not failed and None not in self._all_told() and self._mpi.poll() is None
        running, left = (set(), self._strays(self._own)) if goes_on else self._stop()
        outcomes = [self._outcome(rank, failed, rank in running, is_last) for rank in range(self.size)]
        self._close(left, segments_before, all(outcome.ended == "returned" for outcome in outcomes))
        return outcomes

    def leave(self) -> None:
        """Lets the ranks leave.

        Raises:
            AssertionError: they did not do so by themselves, or left something behind.
        """
        segments_before = _shared_memory()
        self._write("\n")
        self._wait(time.monotonic() + _LEAVE_SECONDS, is_last=True)
        running, left = self._stop()
        said = [self._output(rank) for rank in running]
        try:
            self._close(left, segments_before, not running)
            assert not running, f"ranks {running} did not leave: {said}"
        except AssertionError as error:
            raise AssertionError(f"after {', '.join(self._called)}: {error}") from None

    def _pipe(self, rank: int) -> int:
        """What tells a rank where the next call lies."""
        path = self._path / f"{rank}.calls"
        os.mkfifo(path)
        return os.open(path, os.O_RDWR)  # for writing alone, this would wait for the rank

    def _write(self, line: str) -> None:
        for pipe in self._pipes:
            os.write(pipe, line.encode())

    def _send(self, call: Call, is_last: bool) -> None:
        self._called.append(call.function.__name__)
        self._place = self._path / f"call-{len(self._called)}"
        self._place.mkdir()
        (self._place / "call").write_bytes(call.pickled())
        self._write(f"{self._place.name} {'leave' if is_last else 'stay'}\n")

    def _wait_for_start(self, ends_at: float) -> None:
        for _ in _looks(ends_at):
            if self._mpi.poll() is not None or all(self._pid(rank) for rank in range(self.size)):
                break

    def _wait(self, ends_at: float, is_last: bool) -> bool:
        """Waits until the ranks are done, and have left if this is the last call; whether one has failed."""
        failed_at = 0.0
        for _ in _looks(ends_at):
            told = self._all_told()
            if self._stops_at_failure and not failed_at and self._has_failed(told):
                failed_at = time.monotonic()
            if self._mpi.poll() is not None or (None not in told and (failed_at or not is_last)):
                break
            if failed_at and time.monotonic() > failed_at + GRACE_SECONDS:
                break
        return failed_at > 0

    def _has_failed(self, told: list[dict[str, Any] | None]) -> bool:
        """Whether a rank has raised, or has died without a word."""
        for rank, of_rank in enumerate(told):
            if of_rank is None and self._pid(rank) and not self._runs(rank):
                of_rank = self._told(rank) or {"ended": "died"}
            if of_rank is not None and of_rank["ended"] != "returned":
                return True
        return False

    def _outcome(self, rank: int, failed: bool, running: bool, is_last: bool) -> Outcome:
        told = self._told(rank)
        if running and not failed and (told is None or is_last):  # a rank may have returned and not left
            told = {"ended": "hung"}
        elif told is None:
            told = {"ended": "ended" if running else "died"}
        return Outcome(rank=rank, output=self._output(rank), **told)

    def _output(self, rank: int) -> str:
        return _text(self._place / f"{rank}.output")

    def _pid(self, rank: int) -> int:
        """Its process; 0 if it has not started yet."""
        return int(_text(self._path / f"{rank}.pid") or 0)

    def _runs(self, rank: int) -> bool:
        pid = self._pid(rank)
        return pid > 0 and _runs(pid)

    def _stop(self) -> tuple[set[int], list[str]]:
        """Ends everything.

        Returns:
            The ranks that still ran, and the command lines of what ran after mpirun had ended by itself.
        """
        self.is_over = True
        running: set[int] = set()
        if self._mpi.poll() is not None:
            return running, self._strays(set())
        running = {rank for rank in range(self.size) if self._runs(rank)}
        self._show_stacks(running)
        self._kill()
        return running, []

    def _show_stacks(self, ranks: set[int]) -> None:
        """Makes the ranks write the stacks of their threads into their output, unless they only wait to be ended."""
        written: dict[int, int] = {}  # before
        for rank in ranks:
            told = self._told(rank)
            if told is None or told["ended"] == "returned":
                written[rank] = len(self._output(rank))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid(rank), signal.SIGUSR1)
        for _ in _looks(time.monotonic() + _STACK_BEGINS_WITHIN_SECONDS):
            if all(len(self._output(rank)) > length or not self._runs(rank) for rank, length in written.items()):
                break
        time.sleep(_STACK_SECONDS)

    def _kill(self) -> None:
        self._was_killed = True
        self._mpi.kill()
        self._mpi.wait()
        for pid in self._marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _strays(self, own: set[int]) -> list[str]:
        """The command lines of all processes that do not end though they should."""
        strays: dict[int, str] = {}
        for _ in _looks(time.monotonic() + _VANISH_SECONDS):
            strays = {pid: line for pid, line in self._marked().items() if pid not in own}
            if not strays:
                return []
        self._kill()
        return list(strays.values())

    def _marked(self) -> dict[int, str]:
        """The processes, with their command lines, that carry this world's mark."""
        return processes_with(_MARK, self._mark)

    def _close(self, left: list[str], segments_before: set[str], all_returned: bool) -> None:
        """Checks what a call has left behind."""
        self.is_over = self.is_over or bool(left)
        segments = _shared_memory() - segments_before
        said = ""
        if self.is_over:
            self.mpi_output = _text(self._path / "mpi.output")
            self.mpi_status = self._mpi.returncode
            said = "".join(f"\n--- rank {rank}:\n{self._output(rank)}" for rank in range(self.size))
            for pipe in self._pipes:
                os.close(pipe)
            self._folder.cleanup()
            if not self._was_killed:
                segments |= set(os.listdir(self._memory.name))
            self._memory.cleanup()
        assert not left, f"processes left behind: {left}"
        assert not segments, f"shared memory left behind: {segments}"
        if self._stops_at_failure and all_returned and self.is_over:
            ended = f"every rank returned, but mpirun ended with status {self.mpi_status}: {self.mpi_output}"
            assert self.mpi_status == 0, ended + said

    def _all_told(self) -> list[dict[str, Any] | None]:
        return [self._told(rank) for rank in range(self.size)]

    def _told(self, rank: int) -> dict[str, Any] | None:
        path = self._place / f"{rank}.outcome"
        return pickle.loads(path.read_bytes()) if path.exists() else None


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _looks(ends_at: float) -> Iterator[None]:
    """Once at least, and then again and again until that time, more and more seldom."""
    pause = _FIRST_PAUSE_SECONDS
    yield
    while time.monotonic() < ends_at:
        time.sleep(pause)
        pause = min(1.2 * pause, _LONGEST_PAUSE_SECONDS)
        yield


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def _shared_memory() -> set[str]:
    return {name for name in os.listdir(MEMORY) if name.startswith("horovodish")}
