"""reducescatter and its groups against NumPy: every op and dtype, rows that cannot be dealt evenly, both planes."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.operation import scattered_rows
from support.expect import every_rank_raises
from support.model import FLOATS, INTEGERS, OPS, PLANES, Array, difference, reduced, values
from support.ranks import run_ranks

MAGNITUDE = 10.0
FOUR, TWO = np.zeros((4, 3), np.float32), np.zeros((2, 3), np.float32)


def share(full: Array, rank: int, size: int) -> Array:
    """The rows of `rank`: the first ranks get one more where they cannot be dealt evenly."""
    return np.array_split(full, size)[rank]


def scatter_everything() -> None:
    hvd.init()
    own, size = hvd.rank(), hvd.size()
    wrong = []
    for dtype, op, rows in product(INTEGERS + FLOATS, OPS, sorted({0, 1, size - 1, size, size + 1, 7, 20_011})):
        arrays = [values(dtype, rows, rank, op) for rank in range(size)]
        result = hvd.reducescatter(arrays[own], op=getattr(hvd, op), name=f"{dtype} {op} {rows}")
        told = difference(result, share(reduced(arrays, op), own, size), MAGNITUDE)
        if told or result.dtype != arrays[own].dtype or not np.array_equal(arrays[own], values(dtype, rows, own, op)):
            wrong.append(f"{dtype} {op} {rows}: {told or 'another dtype, or the input was changed'}")
    assert not wrong, "\n".join(wrong)
    rows_of_any_shape()
    scaled_results()
    the_average_is_the_default()
    groups()
    any_order()
    wrong_arguments()


def rows_of_any_shape() -> None:
    own, size = hvd.rank(), hvd.size()
    for shape in [(5, 3), (size, 2, 2), (1, 40_009), (0, 4), (6, 0), (2, 1, 1, 1)]:
        arrays = [values("float64", shape, rank) for rank in range(size)]
        result = hvd.reducescatter(arrays[own], op=hvd.Sum)
        told = difference(result, share(reduced(arrays, "Sum"), own, size), MAGNITUDE)
        assert not told, f"{shape}: {told}"
        result[:] = 0  # writable


def scaled_results() -> None:
    own, size = hvd.rank(), hvd.size()
    for dtype, op, rows in product(["int32", "float16", "float32"], ["Sum", "Max"], [7, 9001]):
        arrays = [values(dtype, rows, rank) for rank in range(size)]
        result = hvd.reducescatter(
            arrays[own], op=getattr(hvd, op), prescale_factor=0.75, postscale_factor=1.5, name=f"x {dtype}{op}{rows}"
        )
        told = difference(result, share(reduced(arrays, op, 0.75, 1.5), own, size), MAGNITUDE)
        assert not told, f"{dtype} {op} {rows}: {told}"


def the_average_is_the_default() -> None:
    full = np.full((hvd.size(), 2), (hvd.size() - 1) / 2)
    result = hvd.reducescatter(np.full((hvd.size(), 2), float(hvd.rank())))
    np.testing.assert_array_equal(result, share(full, hvd.rank(), hvd.size()))


def groups() -> None:
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


def any_order() -> None:
    order = random.Random(hvd.rank())
    turns = list(range(40))
    for _ in range(3):
        order.shuffle(turns)
        handles = {
            turn: hvd.reducescatter_async(np.full((turn, 9), turn + 1.0), op=hvd.Sum, name=f"any {turn}")
            for turn in turns
        }
        for turn, handle in handles.items():
            rows = scattered_rows(turn, hvd.global_process_set)
            np.testing.assert_array_equal(hvd.synchronize(handle), np.full((rows, 9), (turn + 1.0) * hvd.size()))


def wrong_arguments() -> None:
    with pytest.raises(ValueError, match="zero dimensions has no rows to deal out"):
        hvd.reducescatter(np.array(1.0))
    with pytest.raises(ValueError, match="op=Adasum is for allreduce"):
        hvd.reducescatter(FOUR, op=hvd.Adasum)
    with pytest.raises(ValueError, match="is no reduce op"):
        hvd.reducescatter(FOUR, op="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grouped_reducescatter: the group is empty"):
        hvd.grouped_reducescatter([])
    with pytest.raises(hvd.UnsupportedTensorError, match="bool arrays cannot be reduced"):
        hvd.reducescatter(np.ones(4, bool))


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [1, 3, 4])
def test_reducescatter(np: int, plane: str) -> None:
    run_ranks(scatter_everything, np, env={"HOROVODISH_PLANE": plane})


def disagree_about_scattering() -> None:
    hvd.init()
    last = hvd.rank() == hvd.size() - 1

    def other(usual: Any, of_last_rank: Any) -> Any:
        return of_last_rank if last else usual

    def scatter(array: Array, **options: Any) -> None:
        hvd.reducescatter(array, name="x", **options)

    def group(*arrays: Array) -> None:
        hvd.grouped_reducescatter(list(arrays), name="x")

    for _ in range(2):
        every_rank_raises("x", "shape", "(4, 3)", "(2, 3)", lambda: scatter(other(FOUR, TWO)))
        every_rank_raises("x", "dtype", "float32", "float16", lambda: scatter(FOUR.astype(other("f4", "f2"))))
        every_rank_raises("x", "reduction op", "sum", "min", lambda: scatter(FOUR, op=other(hvd.Sum, hvd.Min)))
        every_rank_raises("x", "prescale_factor", "1", "0.5", lambda: scatter(FOUR, prescale_factor=other(1.0, 0.5)))
        every_rank_raises("x", "postscale_factor", "1", "2", lambda: scatter(FOUR, postscale_factor=other(1.0, 2.0)))
        every_rank_raises("x", "number of tensors", "2", "1", lambda: group(*other([FOUR, TWO], [FOUR])))
        every_rank_raises("x[1]", "shape", "(2, 3)", "(4, 3)", lambda: group(FOUR, other(TWO, FOUR)))
        every_rank_raises(
            "x",
            "collective",
            "reducescatter",
            "allreduce",
            lambda: other(hvd.reducescatter, hvd.allreduce)(FOUR, name="x"),
        )


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [2, 4])
def test_disagreement_about_a_reducescatter(np: int, plane: str) -> None:
    run_ranks(disagree_about_scattering, np, env={"HOROVODISH_PLANE": plane})
