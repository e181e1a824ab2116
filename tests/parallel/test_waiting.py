"""Ranks that all wait, but not for the same tensor: rank 0 says who waits for what, and nothing is lost."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support.model import PLANES
from support.on_ranks import on_ranks
from support.processes import output_of
from support.ranks import run_ranks_to_their_ends

LEFT = "'left' was submitted by rank 0 but not by rank 1"
RIGHT = "'right' was submitted by rank 1 but not by rank 0"


def wait_for_different_tensors() -> list[float]:
    hvd.init()
    own, other = ("left", "right") if hvd.rank() == 0 else ("right", "left")
    late: list[Any] = []
    before = signal.signal(
        signal.SIGUSR1, lambda *_: late.append(hvd.allreduce_async(np.full(1, 2.0), op=hvd.Sum, name=other))
    )
    # Another process looks: a thread of this one that wakes by itself might submit what is missing.
    wait_then_signal = 'until grep -q "$2" "$0"; do sleep 0.1; done; kill -USR1 "$1"'
    with subprocess.Popen(["sh", "-c", wait_then_signal, str(output_of(0)), str(os.getpid()), RIGHT]):
        awaited = hvd.allreduce(np.full(1, 1.0 if own == "left" else 2.0), op=hvd.Sum, name=own)
    result = [*awaited, *late[0].wait()]
    signal.signal(signal.SIGUSR1, before)
    return result


@pytest.mark.parametrize("plane", PLANES)
def test_it_is_said_who_waits_for_what(plane: str) -> None:
    env = {"HOROVODISH_PLANE": plane, "HOROVODISH_STALL_CHECK": "0"}  # otherwise all ranks raise
    outcomes = run_ranks_to_their_ends(wait_for_different_tensors, 2, env=env)
    assert [outcome.result for outcome in outcomes] == [[3.0, 4.0], [4.0, 3.0]], outcomes
    assert LEFT in outcomes[0].output
    assert RIGHT in outcomes[0].output
    assert "horovodish" not in outcomes[1].output


@on_ranks((2, "mpi_ring"))
def test_a_rank_looks_often_for_news_of_another_host() -> None:
    """Nothing wakes a rank when another host submits, so the rank looks about as often as that host sleeps for 1 ms."""
    times = 300
    hvd.barrier()
    looked = -resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for _ in range(times if hvd.rank() == 1 else 0):
        time.sleep(0.001)
    hvd.allreduce(np.ones(100_000), name="late")
    looked += resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    assert looked > times / 3
