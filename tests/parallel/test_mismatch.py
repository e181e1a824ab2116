"""Ranks that disagree about a tensor: every rank raises, naming the ranks and both values, and the engine goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support.expect import every_rank_raises
from support.model import PLANES
from support.processes import all_pids, resume, stop, wait_for_output
from support.ranks import run_ranks

FOUR, TWO = np.zeros(4, np.float32), np.zeros(2, np.float32)


def disagree() -> None:
    """One world for all cases: each is followed by a collective that must work."""
    hvd.init()
    last = hvd.rank() == hvd.size() - 1

    def other(usual: Any, of_last_rank: Any) -> Any:
        return of_last_rank if last else usual

    every_rank_raises("x", "shape", "(4,)", "(2,)", lambda: hvd.allreduce(other(FOUR, TWO), name="x"))
    every_rank_raises(
        "x", "shape", "(4,)", "(2, 2)", lambda: hvd.allreduce(other(FOUR, np.zeros((2, 2), np.float32)), name="x")
    )
    every_rank_raises("x", "shape", "(4,)", "()", lambda: hvd.allreduce(other(FOUR, np.float32(0)), name="x"))
    every_rank_raises("x", "dtype", "float32", "float64", lambda: hvd.allreduce(other(FOUR, np.zeros(4)), name="x"))
    every_rank_raises(
        "x", "dtype", "float32", "int32", lambda: hvd.broadcast(other(FOUR, np.zeros(4, np.int32)), 0, name="x")
    )
    every_rank_raises(
        "x", "reduction op", "average", "sum", lambda: hvd.allreduce(FOUR, op=other(hvd.Average, hvd.Sum), name="x")
    )
    every_rank_raises("x", "root rank", "0", "1", lambda: hvd.broadcast(FOUR, other(0, 1), name="x"))
    every_rank_raises(
        "x", "prescale_factor", "1", "0.5", lambda: hvd.allreduce(FOUR, prescale_factor=other(1, 0.5), name="x")
    )
    every_rank_raises(
        "x", "postscale_factor", "1", "2", lambda: hvd.allreduce(FOUR, postscale_factor=other(1, 2), name="x")
    )
    every_rank_raises(
        "x", "shape", "(any, 2)", "(any, 3)", lambda: hvd.allgather(np.zeros((hvd.rank(), other(2, 3))), name="x")
    )
    every_rank_raises(
        "x",
        "collective",
        "allreduce",
        "broadcast",
        lambda: hvd.broadcast(FOUR, 0, name="x") if last else hvd.allreduce(FOUR, name="x"),
    )
    many_operations_survive_one_that_fails(last)


def many_operations_survive_one_that_fails(last: bool) -> None:
    handles = [hvd.allreduce_async(np.full(5, turn + 1.0), op=hvd.Sum, name=f"good {turn}") for turn in range(20)]
    bad = hvd.allreduce_async(np.zeros(5 if last else 6), name="bad")
    for turn, handle in enumerate(handles):
        np.testing.assert_array_equal(hvd.synchronize(handle), np.full(5, (turn + 1.0) * hvd.size()))
    with pytest.raises(hvd.MismatchError, match="tensor 'bad'"):
        hvd.synchronize(bad)
    with pytest.raises(hvd.MismatchError, match="tensor 'bad'"):
        bad.wait()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [2, 4])
def test_disagreement(np: int, plane: str) -> None:
    run_ranks(disagree, np, env={"HOROVODISH_PLANE": plane})


def disagree_more_than_there_is_room_for() -> None:
    """The news for a rank that does not run meanwhile arrive later, though the other does nothing more for it."""
    hvd.init()
    pids = all_pids()
    if hvd.rank() == 0:
        hvd.allreduce(TWO, name="after the other's")
        stop(pids[1])
        expect_many_errors([hvd.allreduce_async(FOUR, name=f"number {i}") for i in range(600)])
        resume(pids[1])
        wait_for_output(1, "heard of all")
    else:
        handles = [hvd.allreduce_async(TWO, name=f"number {i}") for i in range(600)]
        hvd.allreduce(TWO, name="after the other's")
        expect_many_errors(handles)
        print("heard of all", flush=True)


def expect_many_errors(handles: list[Any]) -> None:
    for handle in handles:
        with pytest.raises(hvd.MismatchError):
            handle.wait()


def test_more_news_than_there_is_room_for() -> None:
    run_ranks(disagree_more_than_there_is_room_for, 2, env={"HOROVODISH_STALL_CHECK": "0"})


def disagree_in_a_remembered_call() -> None:
    """A call that the response cache knows is checked as well."""
    hvd.init()
    for _ in range(3):
        hvd.allreduce(FOUR, name="known")
    every_rank_raises(
        "known", "shape", "(4,)", "(2,)", lambda: hvd.allreduce(FOUR if hvd.rank() == 0 else TWO, name="known")
    )
    for _ in range(3):
        np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, name="known"), [2.0, 2.0])


@pytest.mark.parametrize("plane", PLANES)
def test_disagreement_about_a_known_tensor(plane: str) -> None:
    run_ranks(disagree_in_a_remembered_call, 2, env={"HOROVODISH_PLANE": plane})
