"""Where the rest of a JAX program runs when an operation has ended."""

from __future__ import annotations

import os
import time

import jax
import numpy as np

import horovodish as hvd
import horovodish.jax as hvd_jax
from support.ranks import run_ranks
from support.threads import thread_names

ROUNDS = 20
LATE_SECONDS = 0.01  # more than a program drives the engine before it leaves the rest to other threads


def cores_of_completions() -> list[set[int]]:
    """The cores of the threads that go on with a program. Rank 0 needs these threads: it always waits for rank 1."""
    hvd.init()
    doubled = jax.jit(lambda x: hvd_jax.allreduce(x, op=hvd.Sum, name="late") * 2)
    for _ in range(ROUNDS):
        if hvd.rank() == 1:
            time.sleep(LATE_SECONDS)
        np.testing.assert_array_equal(doubled(np.ones(3, np.float32)), np.full(3, 4.0))
    threads = [thread for thread, name in thread_names().items() if name == "horovodish-then"]
    return [os.sched_getaffinity(thread) for thread in threads]


def test_completions_run_on_any_core() -> None:
    usable = os.sched_getaffinity(0)
    first, _ = run_ranks(cores_of_completions, 2, env={"HOROVODISH_THREAD_AFFINITY": f"{max(usable)},{min(usable)}"})
    assert first
    assert all(cores == usable for cores in first)
