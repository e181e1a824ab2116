"""Scripts that catch a StallError and end: with a warning, and with status 0 unless a rank hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CATCHES_A_STALL = """
import sys
import time

import numpy as np

import horovodish as hvd
from horovodish.mpi import binding

lag_seconds, binding._PATIENCE_SECONDS = map(float, sys.argv[1:])
hvd.init()
try:
    hvd.allreduce(np.ones(3), name=f"of rank {hvd.rank()}")
except hvd.StallError:
    print("caught")
if hvd.rank() == 0:
    time.sleep(lag_seconds)
"""


@pytest.mark.parametrize(("lag_seconds", "patience_seconds"), [(2.0, 60.0), (600.0, 1.0)], ids=["lags", "hangs"])
def test_after_a_stall_a_rank_waits_for_the_others_at_its_end(
    lag_seconds: float, patience_seconds: float, tmp_path: Path
) -> None:
    script = tmp_path / "catches.py"
    script.write_text(CATCHES_A_STALL)
    arguments = [str(script), str(lag_seconds), str(patience_seconds)]
    launcher = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "2"]
    command, env = [*launcher, sys.executable, *arguments], {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert ended.stdout.splitlines() == ["caught"] * 2, ended.stderr
    if lag_seconds < patience_seconds:
        assert ended.returncode == 0
        assert all("as if all were well, because its script has caught" in line for line in ended.stderr.splitlines())
    else:
        assert ended.returncode == 1
        assert "after a StallError, and another rank has not ended its script within 1 s: rank 1" in ended.stderr
