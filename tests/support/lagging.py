"""A rank that comes late to one collective after the other."""

from __future__ import annotations

import time

import numpy as np

import horovodish as hvd

STEPS = 10

_LAG_SECONDS = 0.03
_MOST_ROUNDS = 50
"""A busy machine makes other ranks lag as well, but none of them again and again."""


def report_on_lagging(late: int, elements: int) -> hvd.StragglerReport:
    """Reduces arrays of that many elements, to which one rank comes late, in rounds of `STEPS`.

    Every rank must call it.

    Returns:
        The report after the round at whose end that rank is the slowest, or after the last round that there may be.
    """
    for _ in range(_MOST_ROUNDS):
        for _ in range(STEPS):
            if hvd.rank() == late:
                time.sleep(_LAG_SECONDS)
            hvd.allreduce(np.ones(elements), name="gradient")
        report = hvd.straggler_report()
        if report.slowest.rank == late:
            break
    return report
