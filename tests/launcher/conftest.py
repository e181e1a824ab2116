"""Starts the launcher as a user would, watches it from outside, and leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import pytest

import horovodish
from horovodish.launcher.job.environment import THREADS_VARIABLE
from horovodish.launcher.mpirun.installation import QUERY
from support.orphans import processes_with

MARK = "LAUNCHER_TEST"
DEADLINE_SECONDS = 300
"""Nothing here takes that long, however busy the machine is: what does has failed."""
ENDS_WITHIN_SECONDS = 30
"""How long a launcher that is told to end may take before it is killed."""


class Lines:
    """Reads a stream to its end, in a thread, so that a test can wait for a line."""

    def __init__(self, stream: IO[str]) -> None:
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(stream,))
        self._thread.start()

    def wait_for(self, line: str, times: int) -> None:
        with self._news:
            self._news.wait_for(lambda: self._ended or self.lines.count(line) >= times, DEADLINE_SECONDS)
        assert self.lines.count(line) >= times, f"{line!r} did not come {times} times: {self.lines}"

    def to_the_end(self) -> list[str]:
        self._thread.join(DEADLINE_SECONDS)
        return self.lines

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


class Launch:
    """A launcher or a script that starts one, and all processes that it brings about.

    Attributes:
        process: the one that was started.
        stdout: what comes out of it.
        stderr: the same.
    """

    def __init__(self, command: list[str], environ: Mapping[str, str], stdin: str) -> None:
        self.mark = uuid.uuid4().hex
        with ctrl_c_arrives():
            self.process = subprocess.Popen(
                command,
                env={**environ, MARK: self.mark},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdin as pipe:
            pipe.write(stdin)
        self.stdout = Lines(self.process.stdout)
        self.stderr = Lines(self.process.stderr)

    def finish(self, within: float = DEADLINE_SECONDS) -> int:
        """Waits for the launcher and all that it started; returns its exit status."""
        ends_at = time.monotonic() + within
        status = self.process.wait(within)
        for pid in self.processes():
            wait_for_end(pid, ends_at)
        self.stdout.to_the_end()
        self.stderr.to_the_end()
        return status

    def processes(self) -> list[int]:
        """The launcher and everything that inherited its environment and has not ended."""
        return list(processes_with(MARK, self.mark))

    def end(self) -> None:
        """Ends what still runs; the launcher, if it does, with all that it keeps in files."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDS_WITHIN_SECONDS)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.stdout.to_the_end()
        self.stderr.to_the_end()


@contextlib.contextmanager
def ctrl_c_arrives() -> Iterator[None]:
    """What is started meanwhile does not ignore SIGINT, though a shell may have had these tests ignore it.

    One without job control does so with all that it starts in the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for_end(pid: int, ends_at: float) -> None:
    """Waits for the end of a process that need not be a child of this one."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(file, select.POLLIN)
        ended = poller.poll(max(0.0, ends_at - time.monotonic()) * 1000)
        assert ended, f"process {pid} still runs: {command_line(pid)}"
    finally:
        os.close(file)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


Launcher = Callable[..., Launch]


@pytest.fixture
def start() -> Iterator[Launcher]:
    """A function that starts a command; when the test ends, so does everything that was started.

    The number of threads is the launcher's choice, unless the test makes it.
    """
    launches: list[Launch] = []

    def start(*command: str, env: Mapping[str, str] | None = None, stdin: str = "") -> Launch:
        environ = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
        launches.append(Launch(list(command), {**environ, **(env or {})}, stdin))
        return launches[-1]

    yield start
    for started in launches:
        started.end()


@pytest.fixture
def threads_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands that a test starts by itself: the launcher has no number of threads to tell of."""
    monkeypatch.setenv(THREADS_VARIABLE, "1")


@pytest.fixture
def launch(start: Launcher) -> Launcher:
    """A function that starts `horovodish ARGUMENTS`."""

    def launch(
        *arguments: str, env: Mapping[str, str] | None = None, python: str = sys.executable, stdin: str = ""
    ) -> Launch:
        return start(python, "-m", "horovodish.launcher", *arguments, env=env, stdin=stdin)

    return launch


@pytest.fixture
def launch_ranks(launch: Launcher, tmp_path: Path) -> Launcher:
    """A function that runs Python code on ranks: `launch_ranks(np, code, *flags)`.

    The code has `comm` and `rank`; with `mpi=False` it has neither, and the ranks start sooner.
    """

    def start(
        np: int,
        code: str,
        *flags: str,
        mpi: bool = True,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Launch:
        script = tmp_path / "rank.py"
        script.write_text("import os, signal, sys\n" + (MPI_PRELUDE if mpi else "") + code)
        return launch("run", "-np", str(np), *flags, sys.executable, str(script), env=env, stdin=stdin)

    return start


MPI_PRELUDE = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
rank = comm.Get_rank()
"""


class BareEnvironment:
    """A Python environment with horovodish and mpi4py but without MPI; what else it has, a test adds.

    Attributes:
        python: its interpreter.
        variables: what its processes need to have set.
    """

    def __init__(self, folder: Path) -> None:
        self.python = str(folder / "bin" / "python")
        Path(self.python).parent.mkdir(parents=True)
        Path(self.python).symlink_to(Path(sys.executable).resolve())
        (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
        packages = [str(Path(horovodish.__file__).parent.parent), sysconfig.get_path("purelib")]
        self.variables = {
            "PATH": str(Path(self.python).parent),
            "PYTHONPATH": os.pathsep.join(packages),
            "MPI4PY_LIBMPI": str(folder / "no" / "libmpi.so"),
        }

    def add_library(self) -> str:
        """Lets mpi4py find the MPI library of the real environment; returns what it is."""
        query = [sys.executable, "-c", QUERY]
        found = json.loads(subprocess.run(query, capture_output=True, check=True, timeout=DEADLINE_SECONDS).stdout)
        self.variables["MPI4PY_LIBMPI"] = found["path"]
        return str(found["library"])

    def add_mpirun(self, version: str) -> Path:
        """Puts a file in place that says that it is this mpirun, and is of no other use."""
        mpirun = Path(self.python).with_name("mpirun")
        mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
        mpirun.chmod(0o755)
        return mpirun


@pytest.fixture
def bare_environment(tmp_path: Path) -> BareEnvironment:
    return BareEnvironment(tmp_path / "bare")
