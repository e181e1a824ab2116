"""Ranks that disagree about a tensor: every rank raises, naming the ranks and both values, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support.expect import every_rank_raises, unless_last
from support.model import PLANES, Array
from support.on_ranks import on_ranks
from support.processes import all_pids, resume, stop, wait_for_output

FOUR, TWO = np.zeros(4, np.float32), np.zeros(2, np.float32)


def reduce(array: Any = FOUR, **options: Any) -> None:
    hvd.allreduce(array, name="x", **options)


def broadcast(array: Array = FOUR, root: int = 0) -> None:
    hvd.broadcast(array, root, name="x")


def gather(columns: int) -> None:
    hvd.allgather(np.zeros((hvd.rank(), columns)), name="x")


DISAGREEMENTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    "length": ("shape", "(4,)", "(2,)", lambda: reduce(unless_last(FOUR, TWO))),
    "dimensions": ("shape", "(4,)", "(2, 2)", lambda: reduce(unless_last(FOUR, FOUR.reshape(2, 2)))),
    "no dimensions": ("shape", "(4,)", "()", lambda: reduce(unless_last(FOUR, np.float32(0)))),
    "dtype to reduce": ("dtype", "float32", "float64", lambda: reduce(unless_last(FOUR, np.zeros(4)))),
    "dtype to broadcast": ("dtype", "float32", "int32", lambda: broadcast(FOUR.astype(unless_last("f4", "i4")))),
    "op": ("reduction op", "average", "sum", lambda: reduce(op=unless_last(hvd.Average, hvd.Sum))),
    "root": ("root rank", "0", "1", lambda: broadcast(root=unless_last(0, 1))),
    "prescale": ("prescale_factor", "1", "0.5", lambda: reduce(prescale_factor=unless_last(1, 0.5))),
    "postscale": ("postscale_factor", "1", "2", lambda: reduce(postscale_factor=unless_last(1, 2))),
    "columns": ("shape", "(any, 2)", "(any, 3)", lambda: gather(unless_last(2, 3))),
    "collective": ("collective", "allreduce", "broadcast", lambda: unless_last(reduce, broadcast)()),
}


@on_ranks(2, 4, planes=PLANES)
@pytest.mark.parametrize("about", DISAGREEMENTS)
def test_disagreement(about: str) -> None:
    for _ in range(2):  # the second time the cache knows the name with other arguments
        every_rank_raises("x", *DISAGREEMENTS[about])


@on_ranks(2, 4, planes=PLANES)
def test_many_operations_survive_one_that_fails() -> None:
    handles = [hvd.allreduce_async(np.full(5, turn + 1.0), op=hvd.Sum, name=f"good {turn}") for turn in range(20)]
    bad = hvd.allreduce_async(np.zeros(unless_last(6, 5)), name="bad")
    for turn, handle in enumerate(handles):
        np.testing.assert_array_equal(hvd.synchronize(handle), np.full(5, (turn + 1.0) * hvd.size()))
    with pytest.raises(hvd.MismatchError, match="'bad' failed"):
        hvd.synchronize(bad)
    with pytest.raises(hvd.MismatchError, match="'bad' failed"):
        bad.wait()


@on_ranks(2, env={"HOROVODISH_STALL_CHECK": "0"})
def test_more_news_than_there_is_room_for() -> None:
    """The news for a rank that does not run meanwhile arrive later, though the other does nothing more for it."""
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


@on_ranks(2, planes=PLANES)
def test_disagreement_about_a_known_tensor() -> None:
    """A call that the response cache knows is checked as well."""
    for _ in range(3):
        hvd.allreduce(FOUR, name="known")
    every_rank_raises("known", "shape", "(4,)", "(2,)", lambda: hvd.allreduce(unless_last(FOUR, TWO), name="known"))
    for _ in range(3):
        np.testing.assert_array_equal(hvd.allreduce(np.ones(2), op=hvd.Sum, name="known"), [2.0, 2.0])
