"""Ctrl-C while the command still imports what it needs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def slow_imports(tmp_path: Path) -> dict[str, str]:
    """Variables with which the import of NumPy says so and never ends."""
    (tmp_path / "numpy.py").write_text("import threading\nprint('importing', flush=True)\nthreading.Event().wait()\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}


def test_the_command_ends_without_a_traceback(launch: Callable[..., Any], slow_imports: dict[str, str]) -> None:
    job = launch("run", "-np", "1", "true", env=slow_imports)
    job.stdout.wait_for("importing", 1)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == -signal.SIGINT
    assert job.stderr.lines == []


def test_other_programs_are_interrupted_as_ever(start: Callable[..., Any], slow_imports: dict[str, str]) -> None:
    job = start(sys.executable, "-c", "import horovodish", env=slow_imports)
    job.stdout.wait_for("importing", 1)
    job.process.send_signal(signal.SIGINT)
    job.finish()
    assert job.stderr.lines[-1] == "KeyboardInterrupt"
