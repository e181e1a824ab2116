"""A reduction that is caught in the middle."""

from __future__ import annotations

import numpy as np

import horovodish as hvd
from support.model import Array

LENGTH = 6_000_000
LOOKED_AT = 50


def large(rank: int) -> Array:
    """A rank's contribution; what is reduced in place differs from it everywhere."""
    return np.full(LENGTH, rank + 1.0, np.float32)


def catch(array: Array, handle: hvd.collectives.Handle) -> bool:
    """Waits until a part of `array`, which is being reduced in place, has changed; False if all of it has at once."""
    sample = array[:: LENGTH // LOOKED_AT]
    before = float(hvd.rank() + 1)
    while True:
        changed = np.count_nonzero(sample != before)
        if changed or handle.poll():
            return 0 < changed < len(sample) and not handle.poll()
