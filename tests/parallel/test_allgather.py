"""allgather against NumPy: every dtype, a different number of rows on each rank, over both planes."""

from __future__ import annotations

from itertools import product

import numpy as np

import horovodish as hvd
from support.model import FLOATS, INTEGERS, MOVED, PLANES, values
from support.on_ranks import on_ranks

DTYPES = [*MOVED, *INTEGERS, *FLOATS]


def rows_of(rank: int, most: int) -> int:
    """0 rows on rank 1, some on rank 3, many on the others."""
    return {0: most, 1: 0, 2: most // 2 + 1, 3: 3}[rank]


@on_ranks(1, 3, 4, planes=PLANES)
def test_every_dtype() -> None:
    for dtype, most, columns in product(DTYPES, [1, 7, 30_011], [(), (3,), (2, 5)]):
        arrays = [values(dtype, (rows_of(rank, most), *columns), rank) for rank in range(hvd.size())]
        case = f"{dtype} {most} {columns}"
        result = hvd.allgather(arrays[hvd.rank()], name=case)
        np.testing.assert_array_equal(result, np.concatenate(arrays), case, strict=True)


@on_ranks(1, 3, 4, planes=PLANES)
def test_no_rows_at_all() -> None:
    result = hvd.allgather(np.empty((0, 4), np.int16))
    assert (result.shape, result.dtype) == ((0, 4), np.int16)
    assert hvd.allgather(np.empty((2, 0))).shape == (2 * hvd.size(), 0)


@on_ranks(1, 3, 4, planes=PLANES)
def test_arrays_without_dimensions() -> None:
    np.testing.assert_array_equal(hvd.allgather(np.array(hvd.rank())), np.arange(hvd.size()), strict=True)


@on_ranks(1, 3, 4, planes=PLANES)
def test_the_result_is_writable_and_stays() -> None:
    results = [hvd.allgather(np.full(1000, 10 * turn + hvd.rank())) for turn in range(20)]
    for turn, result in enumerate(results):
        np.testing.assert_array_equal(result, np.repeat(10 * turn + np.arange(hvd.size()), 1000))
        result[:] = 0


@on_ranks(1, 3, 4, planes=PLANES)
def test_many_at_once() -> None:
    handles = [hvd.allgather_async(np.full(turn % 3, hvd.rank()), name=f"many {turn}") for turn in range(50)]
    for turn, handle in enumerate(handles):
        np.testing.assert_array_equal(hvd.synchronize(handle), np.repeat(np.arange(hvd.size()), turn % 3))
