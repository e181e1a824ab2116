"""A rank that dies, raises or leaves: the others' calls raise, naming it, within seconds."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

import horovodish as hvd
from support.model import PLANES
from support.ranks import run_ranks_to_their_ends

KNOWN_WITHIN_SECONDS = 5.0
VICTIM = 1


def reduce_until_a_rank_is_lost(dies_in_turn: int | None = None) -> tuple[str, float]:
    """What the survivors are told, and how many seconds after the last collective that worked."""
    last = started = time.monotonic()
    for turn in range(10**9):
        if turn == dies_in_turn and hvd.rank() == VICTIM:
            die()
        try:
            hvd.allreduce(np.full(50_000, hvd.rank()), name=f"turn {turn % 10}")
            last = time.monotonic()
        except hvd.RankLostError as error:
            told = time.monotonic()
            every_later_call_says_so_at_once()
            return str(error), told - last
        assert time.monotonic() - started < 60, "no rank was lost"
    raise AssertionError("not reached")


def every_later_call_says_so_at_once() -> None:
    began = time.monotonic()
    for call in (lambda: hvd.allreduce(np.zeros(2)), hvd.barrier, lambda: hvd.broadcast(np.zeros(2), 0)):
        with pytest.raises(hvd.RankLostError, match=f"rank {VICTIM}"):
            call()
    assert time.monotonic() - began < 1.0


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def one_dies_while_the_others_reduce() -> tuple[str, float]:
    hvd.init()
    return reduce_until_a_rank_is_lost(dies_in_turn=6)


def one_dies_while_the_others_wait() -> tuple[str, float]:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == VICTIM:
        die()
    return reduce_until_a_rank_is_lost()


def the_root_of_the_tree_dies() -> str:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 0:
        die()
    with pytest.raises(hvd.RankLostError, match="rank 0") as raised:
        hvd.allreduce(np.zeros(5), name="without rank 0")
    return str(raised.value)


def one_raises() -> tuple[str, float]:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == VICTIM:
        raise ValueError("a reason of its own")
    return reduce_until_a_rank_is_lost()


def one_leaves() -> tuple[str, float]:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == VICTIM:
        hvd.shutdown()
        return "", 0.0
    return reduce_until_a_rank_is_lost()


def one_exits() -> tuple[str, float]:
    hvd.init()
    hvd.barrier()
    if hvd.rank() == VICTIM:
        sys.exit(3)
    return reduce_until_a_rank_is_lost()


SURVIVORS_ARE_TOLD = {
    one_dies_while_the_others_reduce: "died",
    one_dies_while_the_others_wait: "died",
    one_raises: "raised",
    one_leaves: "returned",
    one_exits: "raised",
}


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("function", SURVIVORS_ARE_TOLD, ids=lambda function: function.__name__)
def test_survivors_are_told(function: Callable[[], tuple[str, float]], plane: str) -> None:
    outcomes = run_ranks_to_their_ends(function, 3, env={"HOROVODISH_PLANE": plane})
    victim = outcomes.pop(VICTIM)
    assert victim.ended == SURVIVORS_ARE_TOLD[function]
    for outcome in outcomes:
        assert outcome.ended == "returned", outcome.output
        message, seconds = outcome.result
        assert f"rank {VICTIM}" in message
        assert seconds < KNOWN_WITHIN_SECONDS


@pytest.mark.parametrize("plane", PLANES)
def test_survivors_are_told_about_rank_0(plane: str) -> None:
    outcomes = run_ranks_to_their_ends(the_root_of_the_tree_dies, 3, env={"HOROVODISH_PLANE": plane})
    assert [outcome.ended for outcome in outcomes] == ["died", "returned", "returned"], outcomes[1].output


def test_the_reason_of_a_rank_that_raised_travels() -> None:
    outcomes = run_ranks_to_their_ends(one_raises, 2)
    assert "a reason of its own" in outcomes[0].result[0]
