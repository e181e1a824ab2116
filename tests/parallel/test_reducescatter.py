"""reducescatter and its groups against NumPy: every op and dtype, rows that cannot be dealt evenly, both planes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.collectives.adapter import dealt_rows
from support.expect import every_rank_raises, unless_last
from support.model import FLOATS, INTEGERS, OPS, PLANES, Array, difference, reduced, values
from support.on_ranks import on_ranks

MAGNITUDE = 10.0
FOUR, TWO = np.zeros((4, 3), np.float32), np.zeros((2, 3), np.float32)


def share(full: Array, rank: int, size: int) -> Array:
    """The rows of `rank`: the first ranks get one more where they cannot be dealt evenly."""
    return np.array_split(full, size)[rank]


@on_ranks(1, 3, 4, planes=PLANES)
def test_every_op_and_dtype() -> None:
    own, size = hvd.rank(), hvd.size()
    wrong = []
    for dtype, op, rows in product(INTEGERS + FLOATS, OPS, sorted({0, 1, size - 1, size, size + 1, 7, 20_011})):
        arrays = [values(dtype, rows, rank, op) for rank in range(size)]
        result = hvd.reducescatter(arrays[own], op=getattr(hvd, op), name=f"{dtype} {op} {rows}")
        told = difference(result, share(reduced(arrays, op), own, size), MAGNITUDE)
        if told or result.dtype != arrays[own].dtype or not np.array_equal(arrays[own], values(dtype, rows, own, op)):
            wrong.append(f"{dtype} {op} {rows}: {told or 'another dtype, or the input was changed'}")
    assert not wrong, "\n".join(wrong)


@on_ranks(1, 3, 4, planes=PLANES)
def test_rows_of_any_shape() -> None:
    own, size = hvd.rank(), hvd.size()
    for shape in [(5, 3), (size, 2, 2), (1, 40_009), (0, 4), (6, 0), (2, 1, 1, 1)]:
        arrays = [values("float64", shape, rank) for rank in range(size)]
        result = hvd.reducescatter(arrays[own], op=hvd.Sum)
        told = difference(result, share(reduced(arrays, "Sum"), own, size), MAGNITUDE)
        assert not told, f"{shape}: {told}"
        result[:] = 0  # writable


@on_ranks(1, 3, 4, planes=PLANES)
def test_scaled_results() -> None:
    own, size = hvd.rank(), hvd.size()
    for dtype, op, rows in product(["int32", "float16", "float32"], ["Sum", "Max"], [7, 9001]):
        arrays = [values(dtype, rows, rank) for rank in range(size)]
        result = hvd.reducescatter(
            arrays[own], op=getattr(hvd, op), prescale_factor=0.75, postscale_factor=1.5, name=f"x {dtype}{op}{rows}"
        )
        told = difference(result, share(reduced(arrays, op, 0.75, 1.5), own, size), MAGNITUDE)
        assert not told, f"{dtype} {op} {rows}: {told}"


@on_ranks(1, 3, 4, planes=PLANES)
def test_the_average_is_the_default() -> None:
    full = np.full((hvd.size(), 2), (hvd.size() - 1) / 2)
    result = hvd.reducescatter(np.full((hvd.size(), 2), float(hvd.rank())))
    np.testing.assert_array_equal(result, share(full, hvd.rank(), hvd.size()))


@on_ranks(1, 3, 4, planes=PLANES)
def test_groups() -> None:
    own, size = hvd.rank(), hvd.size()
    kinds: list[tuple[str, tuple[int, ...]]] = [
        ("float32", (7, 3)),
        ("int16", (0, 2)),
        ("float32", (1,)),
        ("bfloat16", (10_007,)),
        ("int64", (size, 5)),
        ("float32", (size + 1, 0)),
    ]
    for op in ["Average", "Sum", "Max"]:
        arrays = [[values(dtype, shape, rank) for dtype, shape in kinds] for rank in range(size)]
        for _ in range(3):
            results = hvd.grouped_reducescatter(arrays[own], op=getattr(hvd, op), name=f"group {op}")
            for index, result in enumerate(results):
                expected = share(reduced([of_rank[index] for of_rank in arrays], op), own, size)
                told = difference(result, expected, MAGNITUDE)
                assert not told, f"{op} {kinds[index]}: {told}"
    handle = hvd.grouped_reducescatter_async([np.ones(size), np.ones((size, 2))], op=hvd.Sum, prescale_factor=0.5)
    for result in hvd.synchronize(handle):
        np.testing.assert_array_equal(result, np.full(result.shape, size / 2))


@on_ranks(1, 3, 4, planes=PLANES)
def test_any_order() -> None:
    order = random.Random(hvd.rank())
    turns = list(range(40))
    for _ in range(3):
        order.shuffle(turns)
        handles = {
            turn: hvd.reducescatter_async(np.full((turn, 9), turn + 1.0), op=hvd.Sum, name=f"any {turn}")
            for turn in turns
        }
        for turn, handle in handles.items():
            rows = dealt_rows(turn, hvd.global_process_set)[hvd.rank()]
            np.testing.assert_array_equal(hvd.synchronize(handle), np.full((rows, 9), (turn + 1.0) * hvd.size()))


@on_ranks(1, 3, 4, planes=PLANES)
def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="zero dimensions has no rows to deal out"):
        hvd.reducescatter(np.array(1.0))
    with pytest.raises(ValueError, match="op=Adasum is for allreduce"):
        hvd.reducescatter(FOUR, op=hvd.Adasum)
    with pytest.raises(ValueError, match="is not a reduce op"):
        hvd.reducescatter(FOUR, op="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grouped_reducescatter: the group is empty"):
        hvd.grouped_reducescatter([])
    with pytest.raises(hvd.UnsupportedTensorError, match="bool arrays cannot be reduced"):
        hvd.reducescatter(np.ones(4, bool))


def scatter(array: Array = FOUR, **options: Any) -> None:
    hvd.reducescatter(array, name="x", **options)


def group(*arrays: Array) -> None:
    hvd.grouped_reducescatter(list(arrays), name="x")


def reduce(array: Array = FOUR) -> None:
    hvd.allreduce(array, name="x")


DISAGREEMENTS: dict[str, tuple[str, str, str, str, Callable[[], None]]] = {
    "rows": ("x", "shape", "(4, 3)", "(2, 3)", lambda: scatter(unless_last(FOUR, TWO))),
    "dtype": ("x", "dtype", "float32", "float16", lambda: scatter(FOUR.astype(unless_last("f4", "f2")))),
    "op": ("x", "reduction op", "sum", "min", lambda: scatter(op=unless_last(hvd.Sum, hvd.Min))),
    "prescale": ("x", "prescale_factor", "1", "0.5", lambda: scatter(prescale_factor=unless_last(1.0, 0.5))),
    "postscale": ("x", "postscale_factor", "1", "2", lambda: scatter(postscale_factor=unless_last(1.0, 2.0))),
    "length of a group": ("x", "number of tensors", "2", "1", lambda: group(*unless_last([FOUR, TWO], [FOUR]))),
    "rows in a group": ("x[1]", "shape", "(2, 3)", "(4, 3)", lambda: group(FOUR, unless_last(TWO, FOUR))),
    "collective": ("x", "collective", "reducescatter", "allreduce", lambda: unless_last(scatter, reduce)()),
}


@on_ranks(2, 4, planes=PLANES)
@pytest.mark.parametrize("about", DISAGREEMENTS)
def test_disagreement(about: str) -> None:
    for _ in range(2):
        every_rank_raises(*DISAGREEMENTS[about])
