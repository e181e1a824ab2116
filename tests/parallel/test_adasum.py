"""Adasum against the published recursion: every floating-point dtype, several lengths and ranks, over both planes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import horovodish as hvd
from support.expect import every_rank_raises
from support.model import FLOATS, PLANES, adasum, difference, dtype_of, values
from support.ranks import run_ranks

# More than a chunk, so that the products of several chunks and shards are added up.
LENGTHS = [0, 1, 5, 300_007]
MAGNITUDE = 8.0


def reduce_by_adasum() -> None:
    hvd.init()
    size = hvd.size()
    for dtype, length in product(FLOATS, LENGTHS):
        # Of one sign where few: values that cancel make the recursion itself ill-conditioned.
        arrays = [values(dtype, length, rank, "Sum" if length > 5 else "Product") for rank in range(size)]
        result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum, name=f"{dtype} {length}")
        told = difference(result, adasum(arrays), MAGNITUDE)
        assert not told, f"{dtype} {length}: {told}"
        assert result.dtype == dtype_of(dtype)
    what_is_common_counts_once()
    each_tensor_of_a_group_by_itself()
    scales()
    special_values()
    in_place_and_the_same_bits()


def what_is_common_counts_once() -> None:
    own = np.arange(1.0, 8.0)
    np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Adasum), own, rtol=1e-14)
    orthogonal = np.zeros(hvd.size(), np.float32)
    orthogonal[hvd.rank()] = 3.0
    np.testing.assert_array_equal(hvd.allreduce(orthogonal, op=hvd.Adasum), np.full(hvd.size(), 3.0))


def each_tensor_of_a_group_by_itself() -> None:
    shapes = [(3,), (), (0, 2), (70_000,), (4, 5)]
    dtypes = ["float32", "float64", "float32", "bfloat16", "float32"]
    groups = [
        [values(dtype, shape, rank, "Product") for shape, dtype in zip(shapes, dtypes, strict=True)]
        for rank in range(hvd.size())
    ]
    results = hvd.grouped_allreduce(groups[hvd.rank()], op=hvd.Adasum)
    for index, result in enumerate(results):
        told = difference(result, adasum([group[index] for group in groups]), MAGNITUDE)
        assert not told, f"tensor {index}: {told}"


def scales() -> None:
    arrays = [values("float32", 100, rank) for rank in range(hvd.size())]
    result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum, prescale_factor=0.5, postscale_factor=3.0)
    told = difference(result, 1.5 * adasum(arrays), MAGNITUDE)
    assert not told, told


def special_values() -> None:
    """A rank of zeros changes nothing; NaN on one rank shows everywhere."""
    last = hvd.size() - 1
    arrays = [values("float64", 50, rank) * (rank < last or last == 0) for rank in range(hvd.size())]
    np.testing.assert_allclose(hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum), adasum(arrays), rtol=1e-12)
    np.testing.assert_array_equal(hvd.allreduce(np.zeros(9), op=hvd.Adasum), np.zeros(9))
    own = np.full(4, np.nan if hvd.rank() == last else 1.0)
    assert np.isnan(hvd.allreduce(own, op=hvd.Adasum)).all()


def in_place_and_the_same_bits() -> None:
    own = values("float32", 100_000, hvd.rank())
    first = hvd.allreduce(own, op=hvd.Adasum)
    assert hvd.allreduce_(own, op=hvd.Adasum) is own
    np.testing.assert_array_equal(own, first)
    everybody = hvd.allgather(own[None])
    assert (everybody == everybody[0]).all()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [1, 3, 4])
def test_adasum(np: int, plane: str) -> None:
    run_ranks(reduce_by_adasum, np, env={"HOROVODISH_PLANE": plane})


def adasum_in_small_pieces() -> None:
    """Small chunks make the tables of products longer than one."""
    hvd.init()
    groups = [[values("float32", 40 + index, rank) for index in range(200)] for rank in range(hvd.size())]
    results = hvd.grouped_allreduce(groups[hvd.rank()], op=hvd.Adasum)
    for index, result in enumerate(results):
        told = difference(result, adasum([group[index] for group in groups]), MAGNITUDE)
        assert not told, f"tensor {index}: {told}"


@pytest.mark.parametrize("plane", PLANES)
def test_adasum_in_small_pieces(plane: str) -> None:
    env = {"HOROVODISH_PLANE": plane, "HOROVODISH_CHUNK_KB": "4", "HOROVODISH_RING_SEGMENT_KB": "4"}
    run_ranks(adasum_in_small_pieces, 3, env=env)


def adasum_goes_on_without_the_joined() -> None:
    hvd.init()
    if hvd.rank() == hvd.size() - 1:
        hvd.join()
    else:
        arrays = [values("float32", 1000, rank) for rank in range(hvd.size() - 1)]
        result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum, prescale_factor=2.0, name="x")
        told = difference(result, 2 * adasum(arrays), MAGNITUDE)
        assert not told, told
        hvd.join()
    last = hvd.rank() == hvd.size() - 1
    every_rank_raises(
        "x",
        "reduction op",
        "adasum",
        "sum",
        lambda: hvd.allreduce(np.ones(4), op=hvd.Sum if last else hvd.Adasum, name="x"),
    )


@pytest.mark.parametrize("plane", PLANES)
def test_joined_ranks(plane: str) -> None:
    run_ranks(adasum_goes_on_without_the_joined, 3, env={"HOROVODISH_PLANE": plane})
