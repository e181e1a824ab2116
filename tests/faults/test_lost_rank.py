"""A rank that dies, raises or leaves: the others' calls raise, naming it, within seconds."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import pytest

import horovodish as hvd
from support.model import PLANES
from support.ranks import run_ranks_to_their_ends

KNOWN_WITHIN_SECONDS = 5.0
TURNS_BEFORE = 6
OTHERS_SLEEP_AFTER_SECONDS = 0.3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_late() -> None:
    """The others have been waiting for so long that they sleep."""
    time.sleep(OTHERS_SLEEP_AFTER_SECONDS)
    die()


def give_up() -> None:
    raise ValueError("a reason of its own")


def leave() -> None:
    hvd.shutdown()


def end_the_script() -> None:
    sys.exit()


ACTS = {"dies": die, "dies late": die_late, "raises": give_up, "leaves": leave, "exits": end_the_script}
VICTIM_ENDS = {"dies": "died", "dies late": "died", "raises": "raised", "leaves": "returned", "exits": "raised"}


def reduce_until_a_rank_is_lost(victim: int, act: str) -> tuple[str, float]:
    """What the survivors are told, and how many seconds after the last collective that worked."""
    hvd.init()
    last = started = time.monotonic()
    for turn in range(10**9):
        if turn == TURNS_BEFORE and hvd.rank() == victim:
            ACTS[act]()
            return "", 0.0
        try:
            hvd.allreduce(np.full(50_000, hvd.rank()), name=f"turn {turn % 10}")
            last = time.monotonic()
        except hvd.RankLostError as error:
            told = time.monotonic()
            every_later_call_says_so_at_once(victim)
            return str(error), told - last
        assert time.monotonic() - started < 60, "no rank was lost"
    raise AssertionError("not reached")


def every_later_call_says_so_at_once(victim: int) -> None:
    began = time.monotonic()
    for call in (lambda: hvd.allreduce(np.zeros(2)), hvd.barrier, lambda: hvd.broadcast(np.zeros(2), 0)):
        with pytest.raises(hvd.RankLostError, match=f"rank {victim}"):
            call()
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_are_told(victim: int, act: str, plane: str) -> None:
    env = {"HOROVODISH_PLANE": plane}
    outcomes = run_ranks_to_their_ends(reduce_until_a_rank_is_lost, 3, args=(victim, act), env=env)
    assert outcomes.pop(victim).ended == VICTIM_ENDS[act]
    for outcome in outcomes:
        assert outcome.ended == "returned", outcome.output
        message, seconds = outcome.result
        assert f"rank {victim}" in message
        assert act != "raises" or "a reason of its own" in message
        assert seconds < KNOWN_WITHIN_SECONDS
