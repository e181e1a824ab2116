"""Ranks that die, or are waited for too long, while others send to them or receive from them."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import horovodish as hvd
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.transfers import ANY_RANK, receive, send
from support.hosts import hosts, run_on_hosts_to_their_ends
from support.model import PLANES
from support.outcome import Outcome
from support.processes import meet, wait_for_output
from support.ranks import run_ranks, run_ranks_to_their_ends

KNOWN_WITHIN_SECONDS = 20.0
LARGE = 300_000


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def transfer_until_a_rank_dies(victim: int, seed: int) -> tuple[str, float]:
    """Every rank sends to the next one and receives from the one before, and now and then all reduce."""
    hvd.init()
    choice = random.Random(seed)
    meet()
    if hvd.rank() == victim:
        threading.Timer(random.Random(seed).uniform(0, 0.4), die).start()
    following, previous = (hvd.rank() + 1) % hvd.size(), (hvd.rank() - 1) % hvd.size()
    try:
        while True:
            last = time.monotonic()
            length = choice.choice([0, 1, 1000, LARGE])
            received = np.empty(length)
            handles = [receive(ARRAYS, received, previous), send(ARRAYS, np.full(length, hvd.rank() + 0.5), following)]
            if choice.random() < 0.3:
                hvd.allreduce(np.ones(50_000), name="between")
            for handle in handles:
                handle.wait()
            assert (received == previous + 0.5).all()
    except hvd.RankLostError as error:
        return str(error), time.monotonic() - last


def check(outcomes: list[Outcome], victim: int) -> None:
    said = "\n".join(f"--- rank {outcome.rank} {outcome.ended}:\n{outcome.output}" for outcome in outcomes)
    assert outcomes[victim].ended == "died", said
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        assert outcome.ended == "returned", said
        message, seconds = outcome.result
        assert f"rank {victim} has died" in message or f"rank {victim}: " in message, said
        assert seconds < KNOWN_WITHIN_SECONDS


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("plane", PLANES)
def test_a_rank_dies_at_a_random_moment(plane: str, victim: int, seed: int) -> None:
    env = {"HOROVODISH_PLANE": plane}
    check(run_ranks_to_their_ends(transfer_until_a_rank_dies, 3, args=(victim, seed), env=env), victim)


def test_a_rank_of_another_host_dies() -> None:
    with hosts(2) as made:
        check(run_on_hosts_to_their_ends(transfer_until_a_rank_dies, made, [2, 2], args=(3, 5)), 3)


def wait_for_a_rank_that_dies(direction: str) -> tuple[str, float]:
    hvd.init()
    if hvd.rank() == 2:
        meet()
        die()
    handle = {
        "receive": lambda: receive(ARRAYS, np.empty(1), 2),
        "receive from any": lambda: receive(ARRAYS, np.empty(1), ANY_RANK),
        "send": lambda: send(ARRAYS, np.empty(LARGE), 2),
    }[direction]()
    meet()
    last = time.monotonic()
    with pytest.raises(hvd.RankLostError) as raised:
        handle.wait()
    for act in (send, receive):
        with pytest.raises(hvd.RankLostError, match="rank 2"):
            act(ARRAYS, np.empty(1), 1 - hvd.rank()).wait()
    return str(raised.value), time.monotonic() - last


@pytest.mark.parametrize("direction", ["receive", "receive from any", "send"])
@pytest.mark.parametrize("plane", PLANES)
def test_a_rank_dies_that_others_wait_for(plane: str, direction: str) -> None:
    env = {"HOROVODISH_PLANE": plane}
    check(run_ranks_to_their_ends(wait_for_a_rank_that_dies, 3, args=(direction,), env=env), 2)


def memory_stays_when_the_receiver_dies() -> bool:
    hvd.init()
    if hvd.rank() == 1:
        meet()
        die()
    source = np.empty(LARGE)
    watched = weakref.ref(source)
    handle = send(ARRAYS, source, 1)
    meet()
    del source
    with pytest.raises(hvd.RankLostError):
        handle.wait()
    del handle
    hvd.shutdown()
    gc.collect()
    return watched() is not None


@pytest.mark.parametrize("plane", PLANES)
def test_memory_stays_only_where_mpi_may_still_send_it(plane: str) -> None:
    """MPI cancels no send, so it may read the memory for as long as the process lives."""
    env = {"HOROVODISH_PLANE": plane}
    survivor = run_ranks_to_their_ends(memory_stays_when_the_receiver_dies, 2, env=env)[0]
    assert survivor.ended == "returned", survivor.output
    assert survivor.result == (plane == "mpi_ring")


def wait_too_long(shutdown: bool) -> str:
    hvd.init()
    if hvd.rank() == 0:
        waiting = receive(ARRAYS, np.empty(3), 1, 5, name="x")
        if shutdown:
            with pytest.raises(
                hvd.StallError, match=r"rank 0 waits in receive of 'x' from rank 1 with tag 5, for [12] s"
            ):
                waiting.wait()
            return ""
        wait_for_output(0, "rank 0 waits in receive of 'x'")
        others = [receive(ARRAYS, np.empty(LARGE), 1, tag) for tag in (6, 7)]
        # A report of the first one may come before the second one has waited long enough.
        if "tag 6 and 1 more" not in wait_for_output(0, "rank 0 waits in receive from rank 1 with tag 6"):
            wait_for_output(0, "rank 0 waits in receive from rank 1 with tag 7")
        hvd.barrier()
        for handle in (waiting, *others):
            handle.wait()
        return wait_for_output(0, "")
    if shutdown:
        with pytest.raises(hvd.StallError, match="rank 0 waits in receive of 'x' from rank 1 with tag 5"):
            hvd.barrier()
    else:
        hvd.barrier()
        for length, tag in ((3, 5), (LARGE, 6), (LARGE, 7)):
            send(ARRAYS, np.empty(length), 0, tag).wait()
    return ""


@pytest.mark.parametrize("plane", PLANES)
def test_a_receive_that_waits_is_reported_once(plane: str) -> None:
    env = {"HOROVODISH_PLANE": plane, "HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "0.5"}
    output = run_ranks(wait_too_long, 2, args=(False,), env=env)[0]
    assert output.count("warning: rank 0 waits in receive of 'x' from rank 1 with tag 5, for ") == 1
    assert re.search("rank 0 waits in receive from rank 1 with tag (6 and 1 more|7), for ", output)


@pytest.mark.parametrize("plane", PLANES)
def test_after_the_shutdown_time_every_rank_raises(plane: str) -> None:
    env = {"HOROVODISH_PLANE": plane, "HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": "1.5"}
    for outcome in run_ranks_to_their_ends(wait_too_long, 2, args=(True,), env=env):
        assert outcome.ended == "returned", outcome.output


def wait_for_each_other(reports: bool) -> None:
    """Rank 0 waits for an allreduce that rank 1 submits after its receive, whose send comes from another thread."""
    hvd.init()
    if hvd.rank() == 1:
        later = hvd.allreduce_async(np.ones(1), name="later")
        receive(ARRAYS, np.empty(1), 0, 3).wait()
        hvd.allreduce(np.ones(1), name="x")
        later.wait()
        return

    def send_late() -> None:
        if reports:
            report = wait_for_output(0, "rank 1 waits for 'later' and in receive from rank 0 with tag 3, for ")
            assert "'x' was submitted by rank 0 but not by rank 1" in report
        else:
            time.sleep(9)  # ranks that all wait for collectives give up after 5 s
        send(ARRAYS, np.ones(1), 1, 3)

    sender = threading.Thread(target=send_late)
    sender.start()
    hvd.allreduce(np.ones(1), name="x")
    hvd.allreduce(np.ones(1), name="later")
    sender.join()


@pytest.mark.parametrize("plane", PLANES)
def test_a_report_names_a_rank_that_waits_in_a_receive(plane: str) -> None:
    env = {"HOROVODISH_PLANE": plane, "HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "0.5"}
    run_ranks(wait_for_each_other, 2, args=(True,), env=env)


def test_ranks_that_wait_are_not_given_up_while_one_receives() -> None:
    run_ranks(wait_for_each_other, 2, args=(False,))
