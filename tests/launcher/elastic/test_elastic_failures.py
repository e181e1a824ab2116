"""Elastic jobs whose scripts fail by themselves: the job ends with that failure, and names it."""

from __future__ import annotations

import re
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

import horovodish as hvd
from horovodish.elastic import ObjectState
from horovodish.runtime import basics
from support.elastic import Scene, run_elastic
from support.processes import wait_until

HOST = socket.gethostname()


def fail(scene: Scene, kind: str, loses: bool) -> None:
    """Process 0 fails, perhaps after process 1 has died and the others have gone on."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while True:
            if scene.me == 1 and state.step == 3 and loses:
                scene.die("dies")
            if scene.me == 0 and state.step == 6:
                scene.fired(kind)
                if kind == "exits":
                    sys.exit(7)
                raise ZeroDivisionError("a bug of the user's")
            hvd.allreduce(np.ones(3), name="gradient")
            state.step += 1
            state.commit()

    train(ObjectState(step=0))


@pytest.mark.parametrize(
    ("kind", "status", "what"),
    [
        ("exits", 7, "failed with exit status 7"),
        ("raises", 1, "failed with exit status 1: ZeroDivisionError: a bug of the user's"),
    ],
)
def test_a_failure_after_a_loss_gives_the_exit_status(kind: str, status: int, what: str, tmp_path: Path) -> None:
    ended = run_elastic(fail, tmp_path, 3, kind, True, flags=["--min-np", "1"])
    assert ended.status == status, ended.said
    assert ended.fired == {"dies 1", f"{kind} 0"}
    assert f"horovodish: rank 0 on {HOST} {what}\n" in ended.said
    assert ended.said.count("; 2 left") == 1 and "; 1 left" not in ended.said


@pytest.mark.parametrize("least", ["1", "3"])
def test_a_rank_that_exits_is_all_that_is_said(least: str, tmp_path: Path) -> None:
    """The others notice its end first. They neither go on nor end for new processes before its status is known."""
    ended = run_elastic(fail, tmp_path, 3, "exits", False, flags=["--min-np", least])
    assert ended.fired == {"exits 0"}
    said = [line for line in ended.said.splitlines() if line.startswith("horovodish: rank")]
    assert (ended.status, said) == (7, [f"horovodish: rank 0 on {HOST} failed with exit status 7"])


def lose_outside(scene: Scene, hears: bool) -> None:
    """Process 1 dies when the others are outside of a block. They notice, or hear of it before."""
    with hvd.elastic.attempt(ObjectState()):
        hvd.allreduce(np.ones(3), name="inside")
    if scene.me == 1:
        scene.die("outside")
    if hears:
        wait_until(basics.is_cut_off)
    hvd.allreduce(np.ones(3), name="gradient")


STOPPED = r"EngineStoppedError: allreduce 'gradient': the engine has been shut down, because rank 1 (was lost|has died)"


@pytest.mark.parametrize(("hears", "error"), [(False, "RankLostError: "), (True, STOPPED)])
def test_a_loss_outside_of_a_block_comes_with_the_remedy(hears: bool, error: str, tmp_path: Path) -> None:
    ended = run_elastic(lose_outside, tmp_path, 3, hears, flags=["--min-np", "1"])
    assert ended.status == 128 + signal.SIGKILL, ended.said
    assert ended.fired == {"outside 1"}
    assert re.search(f"failed because a rank was lost: {error}", ended.said), ended.said
    assert "terminate called" not in ended.said, "the thread that hears of the loss is within native code at the end"
    assert "go on without a lost rank: call collectives inside of them" in ended.said
    assert f"horovodish: rank 1 on {HOST} was killed by signal 9 (SIGKILL)" in "\n".join(ended.said.splitlines()[-2:])


def end_early(scene: Scene) -> None:
    """Process 0 has fewer steps than the other one, each time."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < (2 if scene.me == 0 else 4):
            hvd.allreduce(np.ones(3), name="gradient")
            state.step += 1
            state.commit()

    train(ObjectState(step=0))


def test_a_script_that_ends_early_each_time_does_not_begin_again_for_ever(tmp_path: Path) -> None:
    ended = run_elastic(end_early, tmp_path, 2, flags=["--min-np", "2"])
    assert ended.status == 1, ended.said
    assert ended.said.count("starting new processes on 2 slots") == 1, ended.said
    assert (
        "LaunchError: too few ranks are left for --min-np, because the scripts of the others have ended" in ended.said
    )
