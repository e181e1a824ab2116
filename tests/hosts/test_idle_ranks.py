"""Ranks that are idle on many hosts, which nothing wakes: a report on waiting does not take them for stopped."""

from __future__ import annotations

import numpy as np

import horovodish as hvd
from support.hosts import hosts, run_on_hosts
from support.processes import wait_for_output

RANKS_PER_HOST = [*[1] * 9, 2]
"""Rank 10 answers by way of rank 9, of another host's rank 1 and of rank 0."""
REPORTS = 5
"""Ranks are asleep for longer in some of them than in others."""


NOTHING_COMES = "was submitted by rank 0 but not by ranks 1-10"


def be_idle_until_it_is_reported() -> str:
    hvd.init()
    for name in [f"x{number}" for number in range(REPORTS)]:
        if hvd.rank() > 0:
            wait_for_output(0, f"'{name}' {NOTHING_COMES}")
        hvd.allreduce(np.zeros(3), name=name)
    return wait_for_output(hvd.rank(), "")


def test_every_idle_rank_answers() -> None:
    env = {"HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "0.5"}
    with hosts(len(RANKS_PER_HOST)) as many:
        output, *_ = run_on_hosts(be_idle_until_it_is_reported, many, RANKS_PER_HOST, env=env)
    reports = [report for report in output.split("horovodish: warning: ") if NOTHING_COMES in report]
    assert len(reports) == REPORTS
    for report in reports:
        for rank in range(1, sum(RANKS_PER_HOST)):
            assert f"\n  rank {rank} has " in report, report
