"""Who makes the others wait, and where the time goes, with several hosts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import horovodish as hvd
from support.hosts import Hosts, hosts, run_on_hosts
from support.lagging import STEPS, report_on_lagging
from support.traces import is_complete, tracks_of


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def lag(late: int, path: str) -> hvd.StragglerReport:
    hvd.init()
    hvd.start_timeline(path)
    return report_on_lagging(late, 300_000)


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
