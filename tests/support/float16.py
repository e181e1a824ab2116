"""float16 numbers near the largest one: their sum is too large for float16, but their average is not."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

import horovodish as hvd

LARGE = 60000.0
LARGE_STEP = 32.0  # between two float16 numbers of that size
LENGTHS = [5, 3000, 300_001]


def large_float16_numbers_stay_finite() -> None:
    """However the factors are given, on whichever way between the ranks."""
    hvd.init()
    size = hvd.size()
    ways: list[dict[str, Any]] = [
        {"op": hvd.Average},
        {"op": hvd.Average, "prescale_factor": 4.0, "postscale_factor": 0.25},
        {"op": hvd.Average, "prescale_factor": 0.5, "postscale_factor": 2.0},
        {"op": hvd.Sum, "prescale_factor": 1 / size},
        {"op": hvd.Sum, "postscale_factor": 1 / size},
        {"op": hvd.Sum, "postscale_factor": -1 / size},
    ]
    for length, (way, options), time in product(LENGTHS, enumerate(ways), range(2)):
        sign = -1 if options.get("postscale_factor", 1) < 0 else 1
        numbers = np.full(length, LARGE, np.float16)
        for result in (
            hvd.allreduce(numbers, name=f"{length} {way}", **options),
            hvd.reducescatter(numbers, name=f"scattered {length} {way}", **options),
        ):
            difference = np.abs(result.astype(np.float64) * sign - LARGE)
            assert not (difference > 2 * LARGE_STEP).any(), (length, options, time, result[difference > 64][:3])
            assert np.isfinite(result).all()
    small = np.full(1000, 2.0**-13, np.float16)  # the average has its digits where there are many partial results
    np.testing.assert_array_equal(hvd.allreduce(small, name="small", op=hvd.Average), small)
    # Every plane adds in float32, which has the range of bfloat16.
    brain = np.full(3000, 1e38, ml_dtypes.bfloat16)
    assert (hvd.allreduce(brain / size, name="brain", op=hvd.Average) == brain / size).all()
