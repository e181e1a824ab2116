"""Errors of NCCL's in the background and ranks that die: every rank raises, and no stream is left waiting."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from support.pretended_gpu import Gpu, variables
from support.processes import all_pids, meet, wait_until, wait_until_ended
from support.ranks import run_ranks_to_their_ends

KNOWN_WITHIN_SECONDS = 10.0


def meet_an_error() -> str:
    hvd.init()
    gpu = Gpu()

    def reduce_often() -> None:
        for _ in range(100):
            gpu.reduce([np.ones(5)], "until it fails")

    with pytest.raises(hvd.HorovodInternalError) as raised:
        reduce_often()
    return str(raised.value)


def test_an_error_in_the_background() -> None:
    outcomes = run_ranks_to_their_ends(meet_an_error, 2, env=variables(2, PRETEND_NCCL_FAILS="4"))
    assert [outcome.ended for outcome in outcomes] == ["returned", "returned"], outcomes
    for outcome in outcomes:
        assert "NCCL failed while a collective was under way: remote process exited" in outcome.result
        assert "NCCL_DEBUG=WARN" in outcome.result


def lose_a_rank() -> tuple[str, float]:
    hvd.init()
    pids = all_pids()
    gpu = Gpu()
    gpu.reduce([np.ones(5)], "works")
    two = hvd.add_process_set([0, 1])
    arrays = [np.ones(5), np.ones(5)]
    if hvd.rank() == 1:
        # Its part of the next ones is launched, but its stream has not come to it when it dies.
        gpu.stream.hold(True)
        gpu.stream.add(np.zeros(1, np.float32), 0.0)
    gpu.submit("allreduce", arrays[:1], arrays[:1], "interrupted", op=hvd.Sum).wait()
    if two.included():
        # Both communicators of rank 0 wait for rank 1, and the end of one may wait for the other.
        which = {"process_set": two, "op": hvd.Sum}
        gpu.submit("allreduce", arrays[1:], arrays[1:], "interrupted", **which).wait()
    meet()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until_ended(pids[1])
    begin = time.monotonic()
    # This process asks horovodish for nothing; the stream waits for a peer that is no more.
    gpu.stream.wait()
    with pytest.raises(hvd.RankLostError) as raised:
        gpu.reduce([np.ones(5)], "afterwards")
    return str(raised.value), time.monotonic() - begin


def lose_a_set(folder: str) -> str:
    hvd.init()
    gpu, pair, ended = Gpu(), hvd.add_process_set([1, 2]), Path(folder, "ended")
    arrays: list[Any] = []  # the stream writes them after the calls have returned
    gpu.reduce([np.ones(5)], "works")
    if not pair.included():
        # Asks horovodish for nothing, so the turns of the pair reach the other ranks late.
        wait_until(ended.exists)
    else:
        with pytest.raises(hvd.HorovodInternalError, match="NCCL failed") as raised:
            submit_until_it_fails(gpu, pair, arrays)
        if hvd.rank() == 1:
            ended.touch()
        assert isinstance(raised.value, hvd.RankLostError)
    # Behind all turns of the pair that are still on their way.
    [total] = gpu.reduce([np.ones(5)], "in the global set")
    return str(total.tolist())


def submit_until_it_fails(gpu: Gpu, process_set: hvd.ProcessSet, arrays: list[Any]) -> None:
    """Operations every 10 ms: while the set comes to its end, some have been decided that wait for their turns."""
    handles = []
    for number in range(3000):
        arrays.append(np.ones(5))
        which = {"process_set": process_set, "op": hvd.Sum}
        handles.append(gpu.submit("allreduce", arrays[-1:], arrays[-1:], f"of the pair {number}", **which))
        time.sleep(0.01)
        while handles and handles[0].poll():
            handles.pop(0).wait()


def test_a_set_that_ends_alone_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """Without shared memory every rank counts as a host of its own, and nobody can wake an idle one."""
    env = variables(3, PRETEND_NCCL_FAILS="4", HOROVODISH_PLANE="mpi_ring")
    outcomes = run_ranks_to_their_ends(lose_a_set, 3, args=(str(tmp_path),), env=env, timeout=60)
    assert [outcome.ended for outcome in outcomes] == ["returned"] * 3, outcomes
    assert {outcome.result for outcome in outcomes} == {str([3.0] * 5)}


def test_a_lost_rank() -> None:
    outcomes = run_ranks_to_their_ends(lose_a_rank, 3, env=variables(3))
    assert [outcome.ended for outcome in outcomes] == ["returned", "died", "returned"], outcomes
    for outcome in (outcomes[0], outcomes[2]):
        text, seconds = outcome.result
        assert "rank 1 has died" in text
        assert seconds < KNOWN_WITHIN_SECONDS
