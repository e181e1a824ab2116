"""Chunks and segments that a plan asks for: any size gives the same results, and ranks must ask for the same."""

from __future__ import annotations

import numpy as np

import horovodish as hvd
from horovodish import _native
from horovodish.runtime import basics
from support.model import PLANES, Array
from support.on_ranks import on_ranks

LENGTH = 300_001


def reduced_by_plan(name: str, chunk_bytes: int, segment_bytes: int) -> tuple[Array, tuple[str, str] | None]:
    own = np.arange(LENGTH, dtype=np.float32) % 100 + hvd.rank()
    plan = basics.engine().plan(
        name,
        _native.REDUCE_OPS["sum"],
        1.0,
        1.0,
        [("x", _native.DTYPES["float32"], (LENGTH,), 0)],
        [-1],
        chunk_bytes=chunk_bytes,
        segment_bytes=segment_bytes,
    )
    address = own.__array_interface__["data"][0]
    plan.submit(0, address, address)
    plan.flush()
    while not plan.wait(0.1):
        pass
    return own, plan.error()


@on_ranks(2, planes=PLANES)
def test_any_size() -> None:
    expected = (np.arange(LENGTH) % 100) * hvd.size() + sum(range(hvd.size()))
    # The last one is more than there is room for.
    for turn, size in enumerate([0, 4096, 12_288, 2**20, 2**26]):
        result, error = reduced_by_plan(f"plan {turn}", size, size)
        assert error is None
        np.testing.assert_array_equal(result, expected)


@on_ranks(2, planes=PLANES)
def test_ranks_that_ask_for_different_sizes() -> None:
    _, error = reduced_by_plan("bad", 4096 * (hvd.rank() + 1), 0)
    assert error is not None
    kind, text = error
    assert kind == "MismatchError"
    assert "disagree about its chunks and segments: rank 0 has 4096 and 0 bytes, rank 1 has 8192 and 0 bytes" in text
