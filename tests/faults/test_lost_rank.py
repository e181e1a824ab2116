"""A rank that dies or raises: the others' calls raise, naming it, within seconds, wherever it happens."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import horovodish as hvd
from horovodish.runtime import basics
from support.hosts import Hosts, hosts, run_on_hosts_to_their_ends
from support.midway import LargeReduction
from support.model import PLANES
from support.outcome import Outcome
from support.processes import all_pids, is_stopped, meet, resume, stop, wait_until_ended
from support.ranks import run_ranks_to_their_ends
from support.threads import engine_thread

KNOWN_WITHIN_SECONDS = 20.0
MPI_KNOWS_WITHIN_SECONDS = 0.3


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def give_up() -> None:
    raise ValueError("a reason of its own")


ACTS = {"dies": die, "raises": give_up}
VICTIM_ENDS = {"dies": "died", "raises": "raised"}


def lose_a_rank(victim: int, phase: str, act: str) -> tuple[str, float]:
    """What a survivor is told, and how many seconds after the last thing that worked."""
    hvd.init()
    pids = all_pids()
    hvd.allreduce(np.zeros(50_000), name="that works")
    is_victim = hvd.rank() == victim
    last = time.monotonic()
    try:
        if phase == "negotiating":
            pending = None if is_victim else hvd.allreduce_async(np.zeros(9), name="without the victim")
            hvd.barrier()  # so the others' submissions have arrived
            last = time.monotonic()
            if pending is None:
                ACTS[act]()
            else:
                pending.wait()
        elif phase == "idle":
            hvd.barrier()
            if is_victim:
                ACTS[act]()
            wait_until_ended(pids[victim])
            last = time.monotonic()
            hvd.allreduce(np.zeros(9))
        else:
            while True:
                last = time.monotonic()
                reduction = LargeReduction()
                if is_victim and reduction.catch():
                    ACTS[act]()
                reduction.finish()
    except hvd.RankLostError as error:
        seconds = time.monotonic() - last
        every_later_call_says_so(victim)
        return str(error), seconds
    raise AssertionError("no rank was lost")


def every_later_call_says_so(victim: int) -> None:
    for call in (lambda: hvd.allreduce(np.zeros(2)), hvd.barrier, lambda: hvd.broadcast(np.zeros(2), 0), hvd.join):
        with pytest.raises(hvd.RankLostError, match=f"rank {victim}"):
            call()


def check(outcomes: list[Outcome], victim: int, act: str) -> None:
    """The fault fired, and every survivor knows what it should."""
    said = "\n".join(f"--- rank {outcome.rank} {outcome.ended}:\n{outcome.output}" for outcome in outcomes)
    assert outcomes[victim].ended == VICTIM_ENDS[act], said
    assert act != "raises" or outcomes[victim].error_class == "ValueError"
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        assert outcome.ended == "returned", said
        message, seconds = outcome.result
        assert f"rank {victim}" in message
        assert act != "raises" or "a reason of its own" in message
        assert seconds < KNOWN_WITHIN_SECONDS


@pytest.mark.parametrize(
    ("victim", "act", "plane", "phase"),
    [
        (*case, phase)
        for case in [
            *((victim, "dies", plane) for victim in (0, 1) for plane in PLANES),
            (0, "raises", "auto"),
            (2, "raises", "mpi_ring"),
        ]
        for phase in ("negotiating", "reducing", "idle")
    ],
)
def test_survivors_are_told(victim: int, act: str, plane: str, phase: str) -> None:
    env = {"HOROVODISH_PLANE": plane}
    check(run_ranks_to_their_ends(lose_a_rank, 3, args=(victim, phase, act), env=env), victim, act)


def hear_of_it_while_nothing_is_under_way(act: str) -> str:
    hvd.init()
    meet()
    if hvd.rank() == 0:
        ACTS[act]()
    while not basics.loss():
        time.sleep(0.01)
    basics.check_no_loss()  # this rank has not needed the one that was lost
    return basics.loss()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("plane", PLANES)
def test_a_rank_that_waits_for_nothing_hears_of_a_loss(plane: str, act: str) -> None:
    env = {"HOROVODISH_PLANE": plane}
    outcomes = run_ranks_to_their_ends(hear_of_it_while_nothing_is_under_way, 3, args=(act,), env=env)
    assert [outcome.ended for outcome in outcomes] == [VICTIM_ENDS[act], "returned", "returned"], outcomes
    assert all("rank 0" in outcome.result for outcome in outcomes[1:])


def run_out_of_memory() -> str:
    """What every rank is told when the last one cannot hold what it should gather."""
    hvd.init()
    part = np.ones(100 << 20, np.uint8)
    if hvd.rank() == hvd.size() - 1:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + part.nbytes,) * 2)
    with pytest.raises(hvd.RankLostError) as raised:
        hvd.allgather(part, name="large")
    return str(raised.value)


@pytest.mark.parametrize("plane", PLANES)
def test_a_rank_without_memory_says_so(plane: str) -> None:
    for outcome in run_ranks_to_their_ends(run_out_of_memory, 2, env={"HOROVODISH_PLANE": plane}):
        assert outcome.ended == "returned", outcome.output
        assert "allgather 'large' failed" in outcome.result
        assert "rank 1: out of memory" in outcome.result


def lose_a_rank_of_a_set() -> str:
    hvd.init()
    pids = all_pids()
    last_two = hvd.add_process_set([1, 2])
    if hvd.rank() == 0:
        wait_until_ended(pids[1])
        return ""
    reduction = hvd.allreduce_async(np.zeros(1_000_000), process_set=last_two)
    if hvd.rank() == 2:
        die()
    with pytest.raises(hvd.RankLostError) as raised:
        reduction.wait()
    return str(raised.value)


def test_what_mpi_says_of_a_rank_of_a_set_names_its_rank_of_the_world() -> None:
    env = {"HOROVODISH_PLANE": "mpi_ring"}
    survivor = run_ranks_to_their_ends(lose_a_rank_of_a_set, 3, env=env)[1]
    assert survivor.ended == "returned", survivor.output
    assert "rank 2" in survivor.result


def raise_while_the_root_is_stopped() -> str:
    """Rank 2 has told rank 0 why it ends. Rank 1 sees MPI fail before it can hear of that."""
    hvd.init()
    pids = all_pids()
    while True:
        reduction = LargeReduction()
        if hvd.rank() == 1 and reduction.catch():
            stop(pids[0])
            threading.Thread(target=resume_when_ended, args=(pids[0], pids[2])).start()
        while hvd.rank() == 2 and not reduction.done():
            if is_stopped(pids[0]):
                give_up()
        try:
            reduction.finish()
        except hvd.RankLostError as error:
            return str(error)


def resume_when_ended(stopped: int, ends: int) -> None:
    wait_until_ended(ends)
    time.sleep(MPI_KNOWS_WITHIN_SECONDS)
    resume(stopped)


def test_the_reason_arrives_though_mpi_is_faster() -> None:
    env = {"HOROVODISH_PLANE": "mpi_ring"}
    outcomes = run_ranks_to_their_ends(raise_while_the_root_is_stopped, 3, env=env)
    assert outcomes[2].error_class == "ValueError", outcomes[2].output
    for outcome in outcomes[:2]:
        assert outcome.ended == "returned", outcome.output
        assert "rank 2 raised ValueError: a reason of its own" in outcome.result


def crash_in_the_engines_thread() -> None:
    hvd.init()
    meet()
    engine = engine_thread()
    if hvd.rank() == 1:
        ctypes.CDLL(None).tgkill(os.getpid(), engine, signal.SIGSEGV)
        threading.Event().wait()  # this thread must not end the barrier before the other one has the signal
    with pytest.raises(hvd.RankLostError, match="rank 1"):
        hvd.barrier()


def test_a_rank_that_crashes_shows_where_its_script_was() -> None:
    told, crashed = run_ranks_to_their_ends(crash_in_the_engines_thread, 2)
    assert told.ended == "returned", told
    assert crashed.ended == "died", crashed
    assert "Fatal Python error: Segmentation fault" in crashed.output
    assert "in crash_in_the_engines_thread" in crashed.output


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


@pytest.mark.parametrize(
    ("victim", "phase", "act"),
    [
        (0, "negotiating", "dies"),
        (2, "reducing", "dies"),
        (3, "idle", "dies"),
        (0, "reducing", "raises"),
        (2, "idle", "raises"),
        (3, "negotiating", "raises"),
    ],
)
def test_survivors_on_both_hosts_are_told(two_hosts: Hosts, victim: int, phase: str, act: str) -> None:
    """Rank 0 leads all, rank 2 speaks for the other host, rank 3 follows there."""
    args = (victim, phase, act)
    check(run_on_hosts_to_their_ends(lose_a_rank, two_hosts, [2, 2], args=args), victim, act)
