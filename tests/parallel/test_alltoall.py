"""alltoall with and without splits: every dtype, uneven and empty parts, received splits, over both planes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support.expect import every_rank_raises, unless_last
from support.model import FLOATS, INTEGERS, MOVED, PLANES, Array, values
from support.on_ranks import on_ranks

DTYPES = [*MOVED, *INTEGERS, *FLOATS]


def splits_of(rank: int, size: int, factor: int) -> list[int]:
    """Rows that a rank sends to each rank: some 0, never as many in both directions."""
    return [(2 * rank + 3 * to) % 5 * factor for to in range(size)]


def exchanged(arrays: list[Array], splits: list[list[int]], rank: int) -> Array:
    """What `rank` receives."""
    parts = []
    for array, counts in zip(arrays, splits, strict=True):
        begin = sum(counts[:rank])
        parts.append(array[begin : begin + counts[rank]])
    return np.concatenate(parts)


@on_ranks(1, 3, 4, planes=PLANES)
def test_every_dtype() -> None:
    own, size = hvd.rank(), hvd.size()
    for dtype, factor, columns in product(DTYPES, [1, 6007], [(), (3,), (2, 2)]):
        splits = [splits_of(rank, size, factor) for rank in range(size)]
        arrays = [values(dtype, (sum(splits[rank]), *columns), rank) for rank in range(size)]
        case = f"{dtype} {factor} {columns}"
        result, received = hvd.alltoall(arrays[own], splits[own], name=case)
        np.testing.assert_array_equal(result, exchanged(arrays, splits, own), case, strict=True)
        np.testing.assert_array_equal(received, np.array([row[own] for row in splits], np.int64), strict=True)
        np.testing.assert_array_equal(arrays[own], values(dtype, arrays[own].shape, own))


@on_ranks(1, 3, 4, planes=PLANES)
def test_without_splits() -> None:
    own, size = hvd.rank(), hvd.size()
    for each, columns in product([0, 1, 5, 4001], [(), (3,)]):
        arrays = [values("float32", (each * size, *columns), rank) for rank in range(size)]
        result = hvd.alltoall(arrays[own])
        assert isinstance(result, np.ndarray)
        np.testing.assert_array_equal(result, exchanged(arrays, [[each] * size] * size, own), strict=True)


@on_ranks(1, 3, 4, planes=PLANES)
def test_splits_of_any_kind() -> None:
    """A list, a tuple, an array; and one rank may leave them out where they are even."""
    size = hvd.size()
    own = np.arange(2 * size) + 100 * hvd.rank()
    expected = np.concatenate([100 * rank + np.arange(2) + 2 * hvd.rank() for rank in range(size)])
    kinds: list[Any] = [[2] * size, (2,) * size, np.full(size, 2), np.full(size, 2, np.int32), np.full(size, 2, "u1")]
    for splits in kinds:
        result, received = hvd.alltoall(own, splits=splits, name="kinds")
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(received, [2] * size)


@on_ranks(1, 3, 4, planes=PLANES)
def test_nothing_to_send() -> None:
    result, received = hvd.alltoall(np.empty((0, 4), np.int16), [0] * hvd.size())
    assert (result.shape, result.dtype) == ((0, 4), np.int16)
    np.testing.assert_array_equal(received, [0] * hvd.size())
    result, received = hvd.alltoall(np.empty((hvd.size(), 0)), [1] * hvd.size())
    assert result.shape == (hvd.size(), 0)
    np.testing.assert_array_equal(received, [1] * hvd.size())


@on_ranks(1, 3, 4, planes=PLANES)
def test_all_rows_to_one_rank() -> None:
    for target, holder in product(range(hvd.size()), repeat=2):
        rows = 3 if hvd.rank() == holder else 0
        splits = [rows if rank == target else 0 for rank in range(hvd.size())]
        result, received = hvd.alltoall(np.full((rows, 2), holder), splits, name="one way")
        arrived = 3 if hvd.rank() == target else 0
        np.testing.assert_array_equal(result, np.full((arrived, 2), holder))
        np.testing.assert_array_equal(received, [arrived if rank == holder else 0 for rank in range(hvd.size())])


@on_ranks(1, 3, 4, planes=PLANES)
def test_the_result_is_writable_and_stays() -> None:
    size = hvd.size()
    handles = [hvd.alltoall_async(np.full(size * turn, hvd.rank() + turn), name=f"many {turn}") for turn in range(30)]
    results = [hvd.synchronize(handle) for handle in handles]
    for turn, result in enumerate(results):
        assert isinstance(result, np.ndarray)
        np.testing.assert_array_equal(result, np.repeat(np.arange(size) + turn, turn))
        result[:] = 0


@on_ranks(1, 3, 4, planes=PLANES)
def test_wrong_splits() -> None:
    size = hvd.size()
    rows = np.zeros((size + 1, 2))
    wrong: dict[str, list[int]] = {
        "too few rows": [1] * size,
        "too many numbers": [1] * (size + 1),
        "negative": [-1, *[0] * (size - 2), size + 2] if size > 1 else [-1],
    }
    for name, splits in wrong.items():
        with pytest.raises(ValueError) as raised:
            hvd.alltoall(rows, splits, name=name)
        assert f"{name}: splits {splits} must be {size} non-negative numbers" in str(raised.value)
        assert f"add up to the {size + 1} rows of the array; they add up to {sum(splits)}" in str(raised.value)
    wrong_types: list[object] = [[0.5] * size, ["1"] * size, np.ones(size), 1, 1.5]
    for wrong_type in wrong_types:
        with pytest.raises(ValueError, match=rf"must be {size} whole numbers, one per rank"):
            hvd.alltoall(rows, wrong_type)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero dimensions has no rows to send"):
        hvd.alltoall(np.array(3))
    if size > 1:
        with pytest.raises(ValueError, match=f"odd: {size + 1} rows cannot be divided evenly by {size} ranks"):
            hvd.alltoall(rows, name="odd")
    np.testing.assert_array_equal(hvd.alltoall(np.full(size, hvd.rank()), name="odd"), np.arange(size))


ROWS = np.zeros((6, 2), np.float32)


def exchange(rows: Array) -> None:
    hvd.alltoall(rows, name="x")


def gather(rows: Array) -> None:
    hvd.allgather(rows, name="x")


DISAGREEMENTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    "dtype": ("dtype", "float32", "int16", lambda: exchange(ROWS.astype(unless_last("f4", "i2")))),
    "columns": ("shape", "(any, 2)", "(any, 5)", lambda: exchange(np.zeros((6, unless_last(2, 5))))),
    "dimensions": ("shape", "(any, 2)", "(any,)", lambda: exchange(unless_last(ROWS, ROWS[:, 0].copy()))),
    "collective": ("collective", "alltoall", "allgather", lambda: unless_last(exchange, gather)(ROWS)),
}


@on_ranks(2, 3, planes=PLANES)
@pytest.mark.parametrize("about", DISAGREEMENTS)
def test_disagreement(about: str) -> None:
    size = hvd.size()
    for _ in range(2):
        every_rank_raises("x", *DISAGREEMENTS[about])
        np.testing.assert_array_equal(hvd.alltoall(np.full(size, hvd.rank()), name="x"), np.arange(size))
