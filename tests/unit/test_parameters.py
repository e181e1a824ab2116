"""Comparisons of parameters in threads."""

from __future__ import annotations

from horovodish.gradients import parameters
from horovodish.runtime.process import Process, part


class _Mark:
    pass


def test_a_comparison_acts_for_the_rank_that_began_it() -> None:
    """Several ranks may live in one process of the operating system."""
    rank, seen = Process(), list[_Mark]()
    with rank.entered():
        parameters._in_a_thread(lambda: seen.append(part(_Mark))).join()
    assert seen == [rank[_Mark]]
