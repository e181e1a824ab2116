"""Who makes the others wait, and where the time goes, with several hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import horovodish as hvd
from support.hosts import Hosts, hosts, run_on_hosts
from support.traces import is_complete, tracks_of

STEPS = 10
LAG_SECONDS = 0.03
MOST_ROUNDS = 50
"""A busy machine makes other ranks lag as well, but none of them again and again."""


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def lag(late: int, path: str) -> hvd.StragglerReport:
    hvd.init()
    hvd.start_timeline(path)
    for _ in range(MOST_ROUNDS):
        for _ in range(STEPS):
            if hvd.rank() == late:
                time.sleep(LAG_SECONDS)
            hvd.allreduce(np.ones(300_000), name="gradient")
        report = hvd.straggler_report()
        if report.slowest.rank == late:
            break
    return report


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_the_rank_that_lags_is_named_on_any_host(two_hosts: Hosts, late: int, tmp_path: Path) -> None:
    reports = run_on_hosts(lag, two_hosts, [2, 2], args=(late, str(tmp_path / "trace.json")))
    assert all(report == reports[0] for report in reports)
    assert reports[0].slowest.rank == late
    for rank in range(4):
        path = tmp_path / f"trace.rank-{rank}.json"
        assert is_complete(path)
        gradient = tracks_of(path, rank)["gradient"]
        assert len(gradient) >= STEPS
        assert all({"pack", "reduce", "exchange", "unpack"} <= set(one.phases()) for one in gradient)
