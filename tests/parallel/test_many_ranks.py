"""More ranks on a host than a node of the negotiation's tree has children: some ranks stand between others."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import horovodish as hvd
from horovodish import _native
from horovodish._native import testing
from support.processes import wait_for_output
from support.ranks import run_ranks, run_ranks_to_their_ends

RANKS = _native.TREE_ARITY + 3
BETWEEN = 1
"""The rank above the last ones."""
BELOW = RANKS - 1
SUBTREE = (BETWEEN, BELOW - 1, BELOW)


def collectives_in_turns() -> None:
    hvd.init()
    total = sum(range(hvd.size()))
    for _ in range(3):
        handles = [hvd.allreduce_async(np.full(5, hvd.rank() + i), op=hvd.Sum, name=f"sum {i}") for i in range(20)]
        for i, handle in enumerate(handles):
            np.testing.assert_array_equal(hvd.synchronize(handle), np.full(5, total + i * hvd.size()))
        assert hvd.broadcast(np.full(3, hvd.rank()), BELOW, name="from below")[0] == BELOW
        assert list(hvd.allgather(np.full(1, hvd.rank()), name="all")) == list(range(hvd.size()))


@pytest.mark.soak
def test_collectives() -> None:
    assert testing.tree_node([list(range(RANKS))], BELOW)[0] == BETWEEN
    run_ranks(collectives_in_turns, RANKS, fresh=True)


def lose(victim: int) -> str:
    hvd.init()
    with pytest.raises(hvd.RankLostError) as raised:
        be_without(victim)
    return str(raised.value)


def be_without(victim: int) -> None:
    hvd.barrier()
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


@pytest.mark.parametrize("victim", [BETWEEN, BELOW])
def test_every_rank_is_told_of_a_loss(victim: int) -> None:
    outcomes = run_ranks_to_their_ends(lose, RANKS, args=(victim,))
    assert outcomes.pop(victim).ended == "died"
    for outcome in outcomes:
        assert outcome.ended == "returned", outcome.output
        assert f"rank {victim} has died" in outcome.result


def submit_after_the_report() -> None:
    hvd.init()
    hvd.barrier()
    if hvd.rank() in SUBTREE:
        wait_for_output(0, "'awaited' was submitted by")
    hvd.allreduce(np.zeros(1), name="awaited")


@pytest.mark.soak
def test_a_report_says_what_ranks_below_an_idle_rank_do() -> None:
    env = {"HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "2"}
    outcomes = run_ranks_to_their_ends(submit_after_the_report, RANKS, env=env)
    assert [outcome.ended for outcome in outcomes] == ["returned"] * RANKS, outcomes
    for rank in SUBTREE:
        assert f"rank {rank} has nothing under way" in outcomes[0].output
