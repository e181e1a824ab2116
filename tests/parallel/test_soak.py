"""A short run of `make soak`, and that growth would be noticed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
STEPS = 240
DESCRIPTOR_PER_STEP = f"import os; exec(open({str(SOAK)!r}).read().replace('order.shuffle(pending)', 'os.dup(0)'))"


def soak(*program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "3", sys.executable, *program]
    return subprocess.run([*command, "--steps", str(STEPS)], capture_output=True, text=True, timeout=300)


@pytest.mark.soak
def test_nothing_grows() -> None:
    done = soak(str(SOAK))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "nothing has grown"


@pytest.mark.soak
def test_a_descriptor_that_is_left_open_in_every_step_is_noticed() -> None:
    done = soak("-c", DESCRIPTOR_PER_STEP)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("grown: {'descriptors': ")


@pytest.mark.parametrize(("values", "grows"), [([9, 5, 5, 5, 5, 5], False), ([5, 5, 5, 5, 6, 6], True)])
def test_what_counts_as_growth(values: list[int], grows: bool) -> None:
    specification = importlib.util.spec_from_file_location("soak", SOAK)
    assert specification is not None
    assert specification.loader is not None
    module: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    seen = [dict.fromkeys(module.ALLOWED_GROWTH, value) for value in values]
    assert set(module.growth(seen)) == ({"descriptors", "threads", "segments"} if grows else set())
