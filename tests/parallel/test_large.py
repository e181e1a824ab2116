"""More than 2^31 - 1 elements: every operation, over both planes."""

from __future__ import annotations

import numpy as np
import pytest

import horovodish as hvd
from support.model import PLANES, Array
from support.on_ranks import on_ranks

pytestmark = pytest.mark.soak

# A length and offsets that no 32-bit number holds, and whose low bits are not zero.
LENGTH = 2**31 + 4099
MARKS = [0, 1, 2**31 - 1, 2**31, LENGTH - 1]


def marked() -> Array:
    """2 GiB that are zero but for the marks: there 1 to 5 on rank 0, 11 to 15 on rank 1."""
    own = np.zeros(LENGTH, np.int8)
    own[MARKS] = np.arange(1, 6) + 10 * hvd.rank()
    return own


def expect(array: Array, at_marks: Array) -> None:
    np.testing.assert_array_equal(array[MARKS], at_marks)
    assert np.count_nonzero(array[:LENGTH]) == len(MARKS)


@on_ranks(2, planes=PLANES, timeout=900)
def test_allreduce() -> None:
    own = marked()
    hvd.allreduce_(own, op=hvd.Sum)
    expect(own, np.arange(1, 6) * 2 + 10)


@on_ranks(2, planes=PLANES, timeout=900)
def test_broadcast() -> None:
    own = marked()
    hvd.broadcast_(own, root_rank=1)
    expect(own, np.arange(1, 6) + 10)


@on_ranks(2, planes=PLANES, timeout=900)
def test_allgather() -> None:
    own = marked()
    rows = own if hvd.rank() == 0 else own[:3]  # the other rank's rows begin beyond 2^31
    gathered = hvd.allgather(rows)
    assert gathered.shape == (LENGTH + 3,)
    expect(gathered, np.arange(1, 6))
    np.testing.assert_array_equal(gathered[LENGTH:], [11, 12, 0])


@on_ranks(2, planes=PLANES, timeout=900)
def test_alltoall() -> None:
    received, counts = hvd.alltoall(marked(), splits=[1, LENGTH - 1])
    each = 1 if hvd.rank() == 0 else LENGTH - 1
    np.testing.assert_array_equal(counts, [each, each])
    if hvd.rank() == 0:
        np.testing.assert_array_equal(received, [1, 11])
    else:
        for sender, part in enumerate((received[: LENGTH - 1], received[LENGTH - 1 :])):
            np.testing.assert_array_equal(part[[mark - 1 for mark in MARKS[1:]]], np.arange(2, 6) + 10 * sender)
            assert np.count_nonzero(part) == 4


@on_ranks(2, planes=PLANES, timeout=900)
def test_reducescatter() -> None:
    scattered = hvd.reducescatter(marked(), op=hvd.Sum)
    first = -(-LENGTH // 2)  # of rank 1
    begin, end = (0, first) if hvd.rank() == 0 else (first, LENGTH)
    assert scattered.shape == (end - begin,)
    for mark, value in zip(MARKS, np.arange(1, 6) * 2 + 10, strict=True):
        if begin <= mark < end:
            assert scattered[mark - begin] == value
