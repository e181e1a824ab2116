"""Adasum against the published recursion: every floating-point dtype, several lengths and ranks, over both planes."""

from __future__ import annotations

import numpy as np
import pytest

import horovodish as hvd
from support.expect import every_rank_raises, unless_last
from support.model import FLOATS, PLANES, adasum, difference, dtype_of, values
from support.on_ranks import on_ranks

# More than a chunk, so that the products of several chunks and shards are added up.
LENGTHS = [0, 1, 5, 300_007]
MAGNITUDE = 8.0


@on_ranks(1, 3, 4, planes=PLANES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_length(dtype: str) -> None:
    size = hvd.size()
    for length in LENGTHS:
        # Of one sign where few: values that cancel make the recursion itself ill-conditioned.
        arrays = [values(dtype, length, rank, "Sum" if length > 5 else "Product") for rank in range(size)]
        result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum, name=f"length {length}")
        told = difference(result, adasum(arrays), MAGNITUDE)
        assert not told, f"{length} elements: {told}"
        assert result.dtype == dtype_of(dtype)


@on_ranks(1, 3, 4, planes=PLANES)
def test_what_is_common_counts_once() -> None:
    own = np.arange(1.0, 8.0)
    np.testing.assert_allclose(hvd.allreduce(own, op=hvd.Adasum), own, rtol=1e-14)
    orthogonal = np.zeros(hvd.size(), np.float32)
    orthogonal[hvd.rank()] = 3.0
    np.testing.assert_array_equal(hvd.allreduce(orthogonal, op=hvd.Adasum), np.full(hvd.size(), 3.0))


@on_ranks(1, 3, 4, planes=PLANES)
def test_each_tensor_of_a_group_by_itself() -> None:
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


@on_ranks(1, 3, 4, planes=PLANES)
def test_scales() -> None:
    arrays = [values("float32", 100, rank) for rank in range(hvd.size())]
    result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum, prescale_factor=0.5, postscale_factor=3.0)
    told = difference(result, 1.5 * adasum(arrays), MAGNITUDE)
    assert not told, told


@on_ranks(1, 3, 4, planes=PLANES)
def test_special_values() -> None:
    """A rank of zeros changes nothing; NaN on one rank shows everywhere."""
    last = hvd.size() - 1
    arrays = [values("float64", 50, rank) * (rank < last or last == 0) for rank in range(hvd.size())]
    np.testing.assert_allclose(hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum), adasum(arrays), rtol=1e-12)
    np.testing.assert_array_equal(hvd.allreduce(np.zeros(9), op=hvd.Adasum), np.zeros(9))
    own = np.full(4, np.nan if hvd.rank() == last else 1.0)
    assert np.isnan(hvd.allreduce(own, op=hvd.Adasum)).all()


@on_ranks(1, 3, 4, planes=PLANES)
def test_in_place_and_on_every_rank_the_same_bits() -> None:
    own = values("float32", 100_000, hvd.rank())
    first = hvd.allreduce(own, op=hvd.Adasum)
    assert hvd.allreduce_(own, op=hvd.Adasum) is own
    np.testing.assert_array_equal(own, first)
    everybody = hvd.allgather(own[None])
    assert (everybody == everybody[0]).all()


@on_ranks(3, planes=PLANES, env={"HOROVODISH_CHUNK_KB": "4", "HOROVODISH_RING_SEGMENT_KB": "4"})
def test_small_chunks_make_tables_of_products_longer_than_one() -> None:
    groups = [[values("float32", 40 + index, rank) for index in range(200)] for rank in range(hvd.size())]
    results = hvd.grouped_allreduce(groups[hvd.rank()], op=hvd.Adasum)
    for index, result in enumerate(results):
        told = difference(result, adasum([group[index] for group in groups]), MAGNITUDE)
        assert not told, f"tensor {index}: {told}"


@on_ranks(3, planes=PLANES)
def test_it_goes_on_without_a_rank_that_has_joined() -> None:
    if hvd.rank() == hvd.size() - 1:
        hvd.join()
    else:
        arrays = [values("float32", 1000, rank) for rank in range(hvd.size() - 1)]
        result = hvd.allreduce(arrays[hvd.rank()], op=hvd.Adasum, prescale_factor=2.0, name="x")
        told = difference(result, 2 * adasum(arrays), MAGNITUDE)
        assert not told, told
        hvd.join()
    every_rank_raises(
        "x",
        "reduction op",
        "adasum",
        "sum",
        lambda: hvd.allreduce(np.ones(4), op=unless_last(hvd.Adasum, hvd.Sum), name="x"),
    )
