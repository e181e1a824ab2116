"""The tests' own tool: results by rank, and what it shows when a rank raises, dies, hangs or leaves a process."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.ranks import GRACE_SECONDS, RanksFailedError, run_ranks, run_ranks_to_their_ends

STARTS_WITHIN_SECONDS = 10.0


@dataclass(frozen=True)
class Seen:
    rank: int
    size: int
    argument: str
    variable: str


def what_it_sees(argument: str) -> Seen:
    from mpi4py import MPI

    return Seen(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, argument, os.environ["OF_THIS_TEST"])


def rank_one_raises() -> None:
    from mpi4py import MPI

    print(f"rank {MPI.COMM_WORLD.rank} was here")
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("rank one has a reason")
    while True:
        wait_where_the_stack_shows_it()


def rank_one_dies() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.1)


def every_rank_hangs() -> None:
    wait_where_the_stack_shows_it()


def wait_where_the_stack_shows_it() -> None:
    time.sleep(1000)


def leave_a_process() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)


def survive_the_others() -> str:
    from mpi4py import MPI

    atexit.register(os._exit, 0)  # the finalizer of MPI would wait for the dead rank
    rank = MPI.COMM_WORLD.rank
    MPI.COMM_WORLD.Barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        raise ValueError("rank two has a reason")
    while len(living_ranks()) > 1:
        time.sleep(0.05)
    return "survived"


def living_ranks() -> list[str]:
    own = Path("/proc/self/cmdline").read_bytes()
    same = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == own:
                same.append(path.parent.name)
    return same


@pytest.mark.parametrize("np", [1, 3])
def test_results_come_by_rank(np: int) -> None:
    seen = run_ranks(what_it_sees, np, args=("an argument",), env={"OF_THIS_TEST": "a value"})
    assert seen == [Seen(rank, np, "an argument", "a value") for rank in range(np)]


def test_a_rank_that_raises_ends_the_run_and_shows_every_rank() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 raised") as failure:
        run_ranks(rank_one_raises, 2)
    assert time.monotonic() - began < STARTS_WITHIN_SECONDS + GRACE_SECONDS
    assert [outcome.ended for outcome in failure.value.outcomes] == ["ended", "raised"]
    assert failure.value.outcomes[1].error_class == "ValueError"
    message = str(failure.value)
    assert "ValueError: rank one has a reason" in message
    assert "rank 0 was here" in message
    assert "wait_where_the_stack_shows_it" in failure.value.outcomes[0].output


def test_a_rank_that_dies_ends_the_run() -> None:
    began = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 died"):
        run_ranks(rank_one_dies, 2)
    assert time.monotonic() - began < STARTS_WITHIN_SECONDS + GRACE_SECONDS


def test_hung_ranks_show_their_stacks() -> None:
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(every_rank_hangs, 2, timeout=3)
    assert [outcome.ended for outcome in failure.value.outcomes] == ["hung", "hung"]
    for outcome in failure.value.outcomes:
        assert "wait_where_the_stack_shows_it" in outcome.output


def test_a_process_left_behind_is_found_and_ended() -> None:
    with pytest.raises(AssertionError, match=r"processes left behind: .*sleep\(100\)"):
        run_ranks(leave_a_process, 1)


def test_survivors_go_on_when_asked_to() -> None:
    outcomes = run_ranks_to_their_ends(survive_the_others, 3)
    assert [outcome.ended for outcome in outcomes] == ["returned", "died", "raised"]
    assert outcomes[0].result == "survived"
    assert "rank two has a reason" in outcomes[2].error


def test_a_function_inside_a_function_is_refused() -> None:
    def inner() -> None:
        pass

    with pytest.raises(ValueError, match="not of module level"):
        run_ranks(inner, 1)
