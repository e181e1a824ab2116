"""broadcast from every root, and barrier, over both planes."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest

import horovodish as hvd
from support.model import FLOATS, INTEGERS, LENGTHS, MOVED, PLANES, values
from support.on_ranks import on_ranks
from support.ranks import run_ranks

DTYPES = [*MOVED, *INTEGERS, *FLOATS]
LATE_SECONDS = 0.3


@on_ranks(1, 3, 4, planes=PLANES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    for length, root in product(LENGTHS, range(hvd.size())):
        own = values(dtype, length, hvd.rank())
        expected = values(dtype, length, root)
        result = hvd.broadcast(own, root_rank=root, name=f"{length} {root}")
        np.testing.assert_array_equal(result, expected, strict=True)
        np.testing.assert_array_equal(own, values(dtype, length, hvd.rank()))
        assert hvd.broadcast_(own, root_rank=root) is own
        np.testing.assert_array_equal(own, expected, strict=True)


@on_ranks(1, 3, 4, planes=PLANES)
def test_any_shape() -> None:
    for shape in [(), (1,), (0, 5), (2, 3, 4)]:
        result = hvd.broadcast(np.full(shape, hvd.rank()), root_rank=hvd.size() - 1)
        np.testing.assert_array_equal(result, np.full(shape, hvd.size() - 1), strict=True)


@on_ranks(1, 3, 4, planes=PLANES)
def test_every_root_at_once() -> None:
    arrays = [np.full(100_000, hvd.rank()) for _ in range(hvd.size())]
    handles = [hvd.broadcast_async_(array, root, name=f"from {root}") for root, array in enumerate(arrays)]
    for root, handle in enumerate(handles):
        assert hvd.synchronize(handle) is arrays[root]
        np.testing.assert_array_equal(arrays[root], np.full(100_000, root))


@on_ranks(1, 3, 4, planes=PLANES)
def test_roots_that_do_not_exist() -> None:
    for root in (-1, hvd.size()):
        with pytest.raises(ValueError, match=f"root_rank={root} does not exist: the ranks are 0 to {hvd.size() - 1}"):
            hvd.broadcast(np.zeros(1), root_rank=root)
    with pytest.raises(
        TypeError, match="root_rank must be an int, the number of a rank, and not ndarray; look at the order"
    ):
        hvd.broadcast(0, np.zeros(1))  # type: ignore[arg-type]


def wait_for_the_last_rank() -> tuple[float, float]:
    """When this rank came to the barrier and when it left, by the clock that the processes of a host share."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(LATE_SECONDS)
    came = time.monotonic()
    hvd.barrier()
    return came, time.monotonic()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("np", [1, 3])
def test_no_rank_leaves_a_barrier_before_the_last_has_come(np: int, plane: str) -> None:
    times = run_ranks(wait_for_the_last_rank, np, env={"HOROVODISH_PLANE": plane})
    assert min(left for _, left in times) >= max(came for came, _ in times)
