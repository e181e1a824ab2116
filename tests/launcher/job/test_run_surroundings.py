"""Where the launcher is started by cron, systemd or CI: few variables, warnings that are errors, an odd folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAUNCHER = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "2"]
RANK = "from mpi4py import MPI; print(MPI.COMM_WORLD.Get_size())"


def test_warnings_may_be_errors_and_variables_may_be_missing(start: Callable[..., Any]) -> None:
    unset = ["-u", "HOME", "-u", "PATH", "-u", "USER", "PYTHONWARNINGS=error", "PYTHONOPTIMIZE=2", "LC_ALL=C"]
    job = start("/usr/bin/env", *unset, *LAUNCHER, "python", "-c", RANK)
    assert job.finish() == 0, job.stderr.lines
    assert job.stdout.lines == ["2", "2"]


def test_a_current_folder_that_was_removed(start: Callable[..., Any], tmp_path: Path) -> None:
    job = start("sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(tmp_path), *LAUNCHER, "true")
    assert job.finish() == 1
    assert job.stderr.lines == [
        "horovodish: the ranks cannot be started: the current folder was removed. Remedy: cd elsewhere"
    ]


def test_a_low_limit_of_open_files(start: Callable[..., Any]) -> None:
    """1024 is usual, and a job of as many ranks needs more. The limit that the user cannot change stays."""
    job = start("sh", "-c", 'ulimit -Sn 12 && exec "$@"', "sh", *LAUNCHER, "sh", "-c", "ulimit -Sn; ulimit -Hn")
    assert job.finish() == 0, job.stderr.lines
    assert len(set(job.stdout.lines)) == 1
