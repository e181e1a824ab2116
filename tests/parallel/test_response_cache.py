"""The response cache at work: every collective goes by id from the second step on, and a small cache suffices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.runtime import basics
from support.model import PLANES
from support.on_ranks import on_ranks
from support.ranks import run_ranks

STEPS = 4
TENSORS = 6


def tensor(index: int) -> np.ndarray[Any, Any]:
    return np.arange(12, dtype=np.float32).reshape(6, 2) + 100 * index


def of_rank(index: int, rank: int) -> np.ndarray[Any, Any]:
    return tensor(index) * (rank + 1)


def gathered(index: int) -> np.ndarray[Any, Any]:
    return np.concatenate([of_rank(index, rank) for rank in range(hvd.size())])


def summed(index: int) -> np.ndarray[Any, Any]:
    return np.sum([of_rank(index, rank) for rank in range(hvd.size())], axis=0, dtype=np.float32)


def own_rows(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array_split(rows, hvd.size())[hvd.rank()]


def exchanged(index: int) -> np.ndarray[Any, Any]:
    return np.concatenate([own_rows(of_rank(index, rank)) for rank in range(hvd.size())])


def splits() -> list[int]:
    return [len(part) for part in np.array_split(np.arange(6), hvd.size())]


# By name: what submits tensor `i` of this rank, and what comes of it.
COLLECTIVES: dict[str, tuple[Callable[[int, str], Any], Callable[[int], Any]]] = {
    "allreduce": (
        lambda i, name: hvd.allreduce_async(of_rank(i, hvd.rank()), op=hvd.Sum, name=name),
        summed,
    ),
    "allgather": (lambda i, name: hvd.allgather_async(of_rank(i, hvd.rank()), name=name), gathered),
    "broadcast": (
        lambda i, name: hvd.broadcast_async(of_rank(i, hvd.rank()), i % hvd.size(), name=name),
        lambda i: of_rank(i, i % hvd.size()),
    ),
    "reducescatter": (
        lambda i, name: hvd.reducescatter_async(of_rank(i, hvd.rank()), op=hvd.Sum, name=name),
        lambda i: own_rows(summed(i)),
    ),
    "alltoall": (
        lambda i, name: hvd.alltoall_async(of_rank(i, hvd.rank()), splits=splits(), name=name),
        exchanged,
    ),
}


def step(names: list[str]) -> int:
    """Runs those collectives on all tensors at once, and gives how many of them were negotiated in full."""
    before = basics.engine().full_requests(0)
    handles = {(name, i): COLLECTIVES[name][0](i, f"{name} {i}") for name in names for i in range(TENSORS)}
    for (name, i), handle in handles.items():
        result = hvd.synchronize(handle)
        array = result[0] if isinstance(result, tuple) else result
        np.testing.assert_array_equal(array, COLLECTIVES[name][1](i), strict=True)
    return basics.engine().full_requests(0) - before


@on_ranks(2, planes=PLANES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_cached_from_the_second_step_on(collective: str) -> None:
    assert [step([collective]) for _ in range(STEPS)] == [TENSORS] + [0] * (STEPS - 1)


@on_ranks(2, planes=PLANES)
def test_different_calls_of_one_name_are_cached_side_by_side() -> None:
    counts = []
    for _ in range(STEPS):
        before = basics.engine().full_requests(0)
        for collective, (submit, expected) in COLLECTIVES.items():
            result = hvd.synchronize(submit(0, "one name"))
            array = result[0] if collective == "alltoall" else result
            np.testing.assert_array_equal(array, expected(0), strict=True)
        counts.append(basics.engine().full_requests(0) - before)
    assert counts == [len(COLLECTIVES)] + [0] * (STEPS - 1)
    with pytest.raises(hvd.MismatchError, match="disagree about its collective"):
        COLLECTIVES["allreduce" if hvd.rank() else "broadcast"][0](0, "one name").wait()


def all_at_once() -> list[int]:
    hvd.init()
    return [step(list(COLLECTIVES)) for _ in range(STEPS)]


@pytest.mark.parametrize("capacity", [0, 1, 7, 29])
def test_more_tensors_than_the_cache_holds(capacity: int) -> None:
    total = TENSORS * len(COLLECTIVES)
    for counts in run_ranks(all_at_once, 3, env={"HOROVODISH_CACHE_CAPACITY": str(capacity)}):
        assert counts == [total] + [total - capacity] * (STEPS - 1)
