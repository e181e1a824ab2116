"""What ranks check of small tensors, whose values travel with the negotiation from the second time on."""

from __future__ import annotations

from itertools import product

import numpy as np

import horovodish as hvd
from support.model import FLOATS, INTEGERS, OPS, values

LENGTH = 5


def the_second_time_gives_the_bits_of_the_first() -> None:
    """The plane computes the first result, every rank for itself the others."""
    hvd.init()
    for dtype, op in product(FLOATS + INTEGERS, OPS):
        own = values(dtype, LENGTH, hvd.rank(), op) * 3
        before, after = (0.3, 1.7) if op == "Sum" else (1.0, 1.0)
        scaled = {"op": getattr(hvd, op), "prescale_factor": before, "postscale_factor": after}
        first, *later = [hvd.allreduce(own, name=f"{dtype} {op}", **scaled) for _ in range(3)]
        assert {result.tobytes() for result in later} == {first.tobytes()}, f"{dtype} {op}"
    for op in OPS:
        group = [
            values(dtype, length, hvd.rank(), op) for dtype in ("float32", "int16", "bfloat16") for length in (3, 0)
        ]
        first, *later = [hvd.grouped_allreduce(group, name=f"group {op}", op=getattr(hvd, op)) for _ in range(3)]
        for results in later:
            assert [result.tobytes() for result in results] == [result.tobytes() for result in first], op
    for root, time in product(range(hvd.size()), range(3)):
        mine = np.full((2, 3), 10 * hvd.rank() + time, np.int16)
        assert hvd.broadcast_(mine, root, f"from {root}") is mine
        np.testing.assert_array_equal(mine, np.full((2, 3), 10 * root + time))
