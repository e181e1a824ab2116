"""Elastic jobs of a function of the tests, and the faults that its ranks commit."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from horovodish.elastic import memory, state
from horovodish.launch.environment import launcher_environment
from support.mpi_command import is_open_mpi
from support.orphans import processes_with
from support.processes import wait_until, wait_until_ended

_LIMIT_SECONDS = 300
_MARK = "ELASTIC_TEST"
_RANK = "import sys; sys.path[0] = sys.argv[1]; from support.elastic import main; main(*sys.argv[2:])"
TESTS = Path(__file__).resolve().parents[1]


COPIES_VARIABLE = "ELASTIC_TEST_COPIES"
"""Whether ranks copy each commit ("always"), or hold each one and copy none ("never"), or do as users see it ("")."""


def copy_commits(when: str) -> None:
    """From now on, copy each commit or none, so that a test knows how many steps are repeated."""
    if when:
        memory.Schedule.is_due = lambda *_: when == "always"  # type: ignore[method-assign]
        state._Budget.allows = lambda _: when == "never"  # type: ignore[method-assign]


@dataclass
class Ended:
    """How an elastic job has ended.

    Attributes:
        status: the launcher's exit status.
        said: what came out of it.
        results: what the function returned, on the ranks where it did.
        fired: the faults that were committed, each with the number of its process, such as "idle 0".
    """

    status: int
    said: str
    results: list[Any] = field(default_factory=list)
    fired: set[str] = field(default_factory=set)


class Scene:
    """What a rank's function is called with: where it is, and how it commits faults.

    Attributes:
        me: the number of this process among those that were started with it.
        start: how often the job had started processes before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        launched = launcher_environment()
        assert launched is not None
        self.me = launched.rank
        self.start = int(os.environ["HOROVODISH_START"])
        self._passed: set[str] = set()
        self._recoveries = 0
        faulthandler.register(signal.SIGTERM, chain=True)  # that ends what hangs
        copy_commits(os.environ.get(COPIES_VARIABLE, "always"))
        for variable in ("HOROVODISH_RUN_DIR", "HOROVODISH_STATE_FOLDER"):
            self.note(f"folder-{uuid.uuid4().hex}", os.environ[variable])
        self.note(f"pid-{self.start}-{self.me}", str(os.getpid()))

    def first_time(self, fault: str) -> bool:
        """Whether this process comes to the place of a fault for the first time, and is one of the first processes."""
        is_first = fault not in self._passed and self.start == 0
        self._passed.add(fault)
        return is_first

    def has_reset(self) -> None:
        """Ranks go on in the same processes, if these are the first ones."""
        self._recoveries += self.start == 0

    def await_recovery(self) -> None:
        """Wait until the launcher knows that the ranks go on, so that the next fault finds them training."""
        self.await_word("in the same processes", self._recoveries)

    def await_word(self, text: str, times: int = 1) -> None:
        """Wait until something was said so often."""
        said = self._folder / "said"
        wait_until(lambda: said.read_text().count(text) >= times)

    def die(self, fault: str) -> None:
        """Leave without a word."""
        self.fired(fault)
        os.kill(os.getpid(), signal.SIGKILL)

    def fired(self, fault: str) -> None:
        """Say that a fault was committed."""
        self.note(f"fired-{fault} {self.me}", "")

    def dies_in(self, fault: str, module: Any, function: str, *, after: int = 0) -> None:
        """From now on, die when this function is called, but for the first `after` calls."""
        original, calls = getattr(module, function), 0

        def dying(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                self.die(fault)
            return original(*args, **kwargs)

        setattr(module, function, dying)

    def before_next(self, module: Any, function: str, action: Callable[[], object]) -> None:
        """Do something before the next call of this function."""
        original = getattr(module, function)

        def first(*args: Any, **kwargs: Any) -> Any:
            setattr(module, function, original)
            action()
            return original(*args, **kwargs)

        setattr(module, function, first)

    def pid(self, rank: int) -> int:
        """The process number of this rank, which was started with this process and has come to its scene."""
        file = self._folder / f"pid-{self.start}-{rank}"
        wait_until(file.exists)
        return int(file.read_text())

    def await_end_of(self, rank: int) -> None:
        """Do nothing until that process has died."""
        wait_until_ended(self.pid(rank))

    def note(self, name: str, text: str) -> None:
        unfinished = self._folder / f"unfinished-{uuid.uuid4().hex}"
        unfinished.write_text(text)
        unfinished.rename(self._folder / name)


def skip_without_survivors() -> None:
    """Skips the test where no rank outlives another one. Tests that start threads call it before `run_elastic` does."""
    if not is_open_mpi():
        pytest.skip("MPICH ends all ranks when one of them dies: make test runs it over Open MPI")


class Weight:
    """Stays the same object, as models do."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> int:
        return self.value

    def load_state_dict(self, state: int) -> None:
        self.value = state


def run_elastic(
    function: Callable[..., Any],
    folder: Path,
    np: int | None,
    *args: Any,
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    inside: Sequence[str] = (),
    at_end: Callable[[], object] = lambda: None,
) -> Ended:
    """Call `function(scene, *args)` on the ranks of an elastic job.

    Args:
        function: of module level.
        folder: an empty one.
        np: the number of ranks; None if the flags say it.
        args: for the function; what JSON can carry.
        flags: of the launcher, `--min-np` among them.
        env: further variables.
        inside: what runs the launcher, which is appended.
        at_end: called when the launcher has ended, before everything else of the job must end.

    Raises:
        AssertionError: the job has left a process or a folder behind.
    """
    skip_without_survivors()
    mark = uuid.uuid4().hex
    count = [] if np is None else ["-np", str(np)]
    launcher = [*inside, sys.executable, "-m", "horovodish.launcher", "run", *count, *flags]
    command = [*launcher, sys.executable, "-c", _RANK]
    command += [str(TESTS), function.__code__.co_filename, function.__name__, str(folder), json.dumps(args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), _MARK: mark}
    said = folder / "said"
    with said.open("w") as out:
        job = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        job.wait(_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        job.terminate()
        job.wait()
        raise AssertionError(f"the job does not end:\n{said.read_text()}") from None
    finally:
        at_end()
    for pid in processes_with(_MARK, mark):
        wait_until_ended(pid)
    left_at = [Path(file.read_text()) for file in folder.glob("folder-*")]
    for place in [*left_at, *(place.parent for place in left_at if place.parent.name.startswith("hvd-state-"))]:
        wait_until(lambda place=place: not place.exists())
    results = [pickle.loads(file.read_bytes()) for file in sorted(folder.glob("result-*"))]
    fired = {file.name.removeprefix("fired-") for file in folder.glob("fired-*")}
    return Ended(job.returncode, said.read_text(), results, fired)


def main(file: str, name: str, folder: str, arguments: str) -> None:
    scene = Scene(Path(folder))
    function = runpy.run_path(file)[name]
    result = function(scene, *json.loads(arguments))
    path = Path(folder, f"result-{scene.start}-{scene.me}")
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    path.write_bytes(pickle.dumps(result))
