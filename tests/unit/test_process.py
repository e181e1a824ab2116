"""Several ranks in one operating-system process: each has its engine, its process sets and its counters."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import numpy as np

import horovodish as hvd
from horovodish.runtime.process import Process

one, other = Process(), Process()
for process in (one, other):
    with process.entered():
        assert not hvd.is_initialized()
        hvd.init()
        assert hvd.allreduce(np.ones(2)).tolist() == [1, 1]
assert not hvd.is_initialized()
with one.entered():
    assert hvd.global_process_set.process_set_id == 0
    hvd.shutdown()
    assert hvd.global_process_set.process_set_id is None
with other.entered():
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.rank() == 0
    assert hvd.allreduce(np.ones(3)).tolist() == [1, 1, 1]
    hvd.shutdown()
"""


def test_ranks_in_one_process_are_apart() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
