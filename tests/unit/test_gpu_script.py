"""The steps of `benchmarks/gpu.sh`, with a script in the place of Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.sources import ROOT

STEPS = ["machine", "first", "first-two", "tests", "one-rank", "thresholds", "two-ranks"]


def run(folder: Path, *steps: str) -> tuple[int, list[str], str]:
    """The exit status, the steps that were done in their order, and what was printed. The tests fail."""
    python = folder / "python"
    python.write_text('#!/bin/sh\necho "told $NCCL_DEBUG: $*"\ncase "$*" in "-m pytest "*) exit 3 ;; esac\n')
    python.chmod(0o755)
    command = ["sh", str(ROOT / "benchmarks/gpu.sh"), str(folder / "out"), str(python), *steps]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "told " in done.stdout, done.stderr
    begun = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("== ")]
    return done.returncode, begun[::2], done.stdout


def test_a_step_that_fails_keeps_no_other_from_running(tmp_path: Path) -> None:
    status, begun, text = run(tmp_path)
    assert (status, begun) == (1, STEPS)
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted(f"{step}.txt" for step in STEPS)
    assert f"all of it in {out}/tests.txt" in text
    assert "== tests: exit status 3" in text
    tests = (out / "tests.txt").read_text()
    assert "-m gpu" in tests
    assert "tests/frameworks/torch/test_cuda.py" in tests
    assert (out / "first.txt").read_text().startswith("told INFO: benchmarks/gpu.py --models")
    assert (out / "two-ranks.txt").read_text().startswith("told WARN: -m horovodish.launcher run -np 2 ")


def test_only_the_steps_that_are_named(tmp_path: Path) -> None:
    status, begun, _ = run(tmp_path, "two-ranks", "machine")
    assert (status, begun) == (0, ["machine", "two-ranks"])
