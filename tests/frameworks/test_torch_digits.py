"""The example that `make demo` runs: the digits are learned, and all ranks end with the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "torch_digits.py"


def output_of(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def check(output: str, ranks: int) -> None:
    accuracy = re.search(r"trained in .* test accuracy (\d\.\d+)", output)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 0.97
    assert re.search(rf"all {ranks} ranks hold bit-identical weights, sha256 [0-9a-f]{{64}}\n", output), output
    assert output.count("epoch  1/") == 1, "only rank 0 may print"


@pytest.mark.parametrize("np", [2, 4])
def test_with_the_launcher(np: int) -> None:
    launcher = [sys.executable, "-m", "horovodish.launcher", "run", "-np", str(np)]
    check(output_of(*launcher, sys.executable, str(SCRIPT)), np)


def test_alone() -> None:
    check(output_of(sys.executable, str(SCRIPT)), 1)
