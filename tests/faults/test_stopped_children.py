"""A stopped process of a rank that is not the rank itself: others do not give the rank up."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import horovodish as hvd
from horovodish.elastic import ObjectState
from support.elastic import Scene, run_elastic
from support.processes import stop

STEPS = 8


def train_with_a_stopped_worker(scene: Scene) -> Any:
    """Process 0 has a child that is stopped. Later process 2 is stopped, and the launcher loses patience with it."""
    state = ObjectState(step=0)
    if scene.me == 0:
        child = subprocess.Popen(["sleep", "1000"])
        stop(child.pid)

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < STEPS:
            hvd.allreduce(np.ones(3), name="gradient")
            if scene.me == 2 and state.step == 2:
                scene.fired("stopped")
                os.kill(os.getpid(), signal.SIGSTOP)
            state.step += 1
            state.commit()

    try:
        train(state)
    finally:
        if scene.me == 0:
            child.kill()
            child.wait()
    return scene.me, scene.start, hvd.size(), state.step


def test_a_rank_with_a_stopped_child_is_not_lost(tmp_path: Path) -> None:
    ended = run_elastic(train_with_a_stopped_worker, tmp_path, 3, flags=["--min-np", "1"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"stopped 2"}
    assert ended.results == [(0, 0, 2, STEPS), (1, 0, 2, STEPS)], ended.said
