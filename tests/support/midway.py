"""A reduction that is caught in the middle."""

from __future__ import annotations

import numpy as np

import horovodish as hvd
from support.model import Array

_LENGTH = 6_000_000
_LOOKED_AT = 50


class LargeReduction:
    """A sum in place of much data; every element of the result differs from what this rank has put in."""

    def __init__(self) -> None:
        self._own = float(hvd.rank() + 1)
        self._array: Array = np.full(_LENGTH, self._own, np.float32)
        self._handle = hvd.allreduce_async_(self._array, op=hvd.Sum, name="large")

    def catch(self) -> bool:
        """Waits until a part has been reduced; False if all of it is by then."""
        sample = self._array[:: _LENGTH // _LOOKED_AT]
        while True:
            changed = np.count_nonzero(sample != self._own)
            if changed or self.done():
                return 0 < changed < len(sample) and not self.done()

    def done(self) -> bool:
        """Whether all of it has been reduced."""
        return self._handle.poll()

    def finish(self) -> None:
        """Waits for the result and checks it."""
        total = sum(range(1, hvd.size() + 1))
        np.testing.assert_array_equal(self._handle.wait(), np.full(_LENGTH, total, np.float32))
