"""More than 2^31 - 1 elements: every operation, over both planes."""

from __future__ import annotations

import numpy as np

import horovodish as hvd
from support.model import PLANES, Array
from support.on_ranks import on_ranks

# A length and offsets that no 32-bit number holds, and whose low bits are not zero.
LENGTH = 2**31 + 4099
MARKS = [0, 1, 2**31 - 1, 2**31, LENGTH - 1]


def expect(array: Array, at_marks: Array) -> None:
    np.testing.assert_array_equal(array[MARKS], at_marks)
    assert np.count_nonzero(array[:LENGTH]) == len(MARKS)


@on_ranks(2, planes=PLANES, timeout=900)
def test_more_than_2_to_the_31_elements() -> None:
    own = np.zeros(LENGTH, np.int8)
    own[MARKS] = np.arange(1, 6) + 10 * hvd.rank()
    hvd.allreduce_(own, op=hvd.Sum)
    expect(own, np.arange(1, 6) * 2 + 10)

    own[MARKS] = np.arange(1, 6) + 10 * hvd.rank()
    hvd.broadcast_(own, root_rank=1)
    expect(own, np.arange(1, 6) + 10)

    rows = own if hvd.rank() == 0 else own[:3]  # uneven: the other rank's rows begin beyond 2^31
    gathered = hvd.allgather(rows)
    assert gathered.shape == (LENGTH + 3,)
    expect(gathered, np.arange(1, 6) + 10)
    np.testing.assert_array_equal(gathered[LENGTH:], [11, 12, 0])
    del gathered

    received, counts = hvd.alltoall(own, splits=[1, LENGTH - 1])
    each = 1 if hvd.rank() == 0 else LENGTH - 1
    np.testing.assert_array_equal(counts, [each, each])
    if hvd.rank() == 0:
        np.testing.assert_array_equal(received, [11, 11])
    else:
        for part in (received[: LENGTH - 1], received[LENGTH - 1 :]):
            np.testing.assert_array_equal(part[[mark - 1 for mark in MARKS[1:]]], np.arange(12, 16))
            assert np.count_nonzero(part) == 4
    del received

    scattered = hvd.reducescatter(own, op=hvd.Sum)
    first = -(-LENGTH // 2)  # of rank 1
    begin, end = (0, first) if hvd.rank() == 0 else (first, LENGTH)
    assert scattered.shape == (end - begin,)
    for mark, value in zip(MARKS, range(11, 16), strict=True):
        if begin <= mark < end:
            assert scattered[mark - begin] == 2 * value
