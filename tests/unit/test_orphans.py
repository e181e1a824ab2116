"""Tests that are killed leave no process behind, whatever it is doing, and no folder of a world."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import horovodish as hvd
from support.orphans import MEMORY, looks
from support.processes import all_pids, stop, wait_until_ended, wait_until_state
from support.sources import ROOT

KILLED = """
import os
import subprocess
import sys
from pathlib import Path

from support.orphans import mark_of_this_process
from support.ranks import run_ranks
from unit.test_orphans import be_idle, kill


def test_that_is_killed():
    folder, victim = Path(os.environ["FOLDER"]), os.environ["VICTIM"]
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(folder, str(process.pid)).touch()
    Path(folder, mark_of_this_process()).touch()
    run_ranks(be_idle, 2, args=(folder,))
    run_ranks(kill, 3, args=(folder, os.getpid() if victim == "tests" else os.getppid()))
"""


def be_idle(folder: Path) -> None:
    Path(folder, str(os.getpid())).touch()


def kill(folder: Path, victim: int) -> None:
    """Rank 0 does, while rank 1 does not end when asked to, and rank 2 is stopped."""
    hvd.init()
    pids = all_pids()
    Path(folder, str(os.getpid())).touch()
    hvd.barrier()
    if hvd.rank() == 0:
        wait_until_state(pids[2], "T")
        os.kill(victim, signal.SIGKILL)
    elif hvd.rank() == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop(pids[2])
    while True:
        signal.pause()


@pytest.mark.parametrize(
    ("options", "victim"),
    [
        pytest.param([], "tests", id="all in one", marks=pytest.mark.soak),
        pytest.param(["--numprocesses=1", "--max-worker-restart=0"], "tests", id="worker", marks=pytest.mark.soak),
        pytest.param(["--numprocesses=1"], "their parent", id="parent of workers"),
    ],
)
def test_nothing_outlives_tests_that_are_killed(options: list[str], victim: str, tmp_path: Path) -> None:
    folder, file = tmp_path / "names", tmp_path / "test_that_is_killed.py"
    folder.mkdir()
    file.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "FOLDER": str(folder), "VICTIM": victim}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options, str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert "passed" not in done.stdout and done.returncode in (1, -signal.SIGKILL), done.stdout + done.stderr
    names = os.listdir(folder)
    (mark,) = (name for name in names if not name.isdigit())
    assert len(names) == 1 + 1 + 2 + 3, done.stdout + done.stderr
    for name in names:
        if name != mark:
            wait_until_ended(int(name))
    for _ in looks(60.0):
        left = [path for place in (tempfile.gettempdir(), MEMORY) for path in Path(place).glob(f"{mark}*")]
        if not left:
            break
    assert left == []
