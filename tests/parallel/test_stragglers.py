"""The report on who makes the others wait."""

from __future__ import annotations

import numpy as np
import pytest

import horovodish as hvd
from horovodish.runtime import basics
from support.lagging import STEPS, report_on_lagging
from support.model import PLANES
from support.on_ranks import on_ranks
from support.ranks import run_ranks


def lag(late: int) -> hvd.StragglerReport:
    hvd.init()
    assert [one.rank for one in hvd.straggler_report().ranks] == list(range(hvd.size()))
    return report_on_lagging(late, 3)


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("late", [0, 2])
def test_the_rank_that_lags_is_named(late: int, plane: str) -> None:
    reports = run_ranks(lag, 3, args=(late,), env={"HOROVODISH_PLANE": plane})
    assert reports[0] == reports[1] == reports[2]
    report = reports[0]
    assert report.slowest.rank == late
    assert report.collectives >= STEPS + 1
    assert report.slowest.mean_seconds <= report.slowest.longest_seconds <= report.slowest.total_seconds
    assert str(report).splitlines()[2].split()[0] == str(late)


@on_ranks(3)
def test_process_sets_are_counted_apart() -> None:
    ends = hvd.add_process_set([0, 2])
    if not ends.included():
        with pytest.raises(ValueError, match="rank 1 is not in process set"):
            hvd.straggler_report(ends)
        return
    assert hvd.straggler_report(ends) == hvd.StragglerReport((hvd.RankLateness(0), hvd.RankLateness(2)))
    hvd.allreduce(np.ones(3), process_set=ends)
    report = hvd.straggler_report(ends)
    assert report.collectives == 2  # with the first report
    for _ in range(3 - hvd.rank()):
        basics.engine().begin_step()
    report = hvd.straggler_report(ends)
    assert "(3 collectives, 2 ranks, 3 steps):" in str(report)
    assert [one.rank for one in report.ranks] == [0, 2]


def ask_without_the_first_rank() -> None:
    with pytest.raises(hvd.NotInitializedError):
        hvd.straggler_report()
    hvd.init()
    if hvd.rank() > 0:
        with pytest.raises(ValueError, match="rank 0, which has the figures, has joined"):
            hvd.straggler_report()
    hvd.join()


def test_it_needs_the_first_rank() -> None:
    run_ranks(ask_without_the_first_rank, 2)


def test_a_world_of_one_rank_waits_for_nobody() -> None:
    (report,) = run_ranks(lag, 1, args=(0,))
    assert report.slowest.total_seconds == 0


def test_the_table() -> None:
    report = hvd.StragglerReport(
        (hvd.RankLateness(0, 3, 40e-6, 92e-6), hvd.RankLateness(1, 197, 12.1e-3, 14.3e-3), hvd.RankLateness(2))
    )
    assert str(report).splitlines() == [
        "which rank was last (200 collectives, 3 ranks):",
        "  rank   times last     mean wait  longest wait    total wait",
        "     1     197  98%       12.1 ms       14.3 ms        2.38 s",
        "     0       3   2%         40 us         92 us        120 us",
        "     2       0   0%          0 us          0 us          0 us",
    ]
    many = hvd.StragglerReport(tuple(hvd.RankLateness(rank, 1, rank) for rank in range(100)))
    assert str(many).splitlines()[-1] == "  and 84 more ranks; the others waited less for them"
