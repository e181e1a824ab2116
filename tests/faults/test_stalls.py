"""A rank that lags or is stopped: the report says which one, and after the shutdown time every rank raises."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import horovodish as hvd
from horovodish.runtime import basics
from support.hosts import hosts, run_on_hosts_to_their_ends
from support.midway import LargeReduction
from support.outcome import Outcome
from support.processes import all_pids, output_of, resume, wait_for_output, wait_until_state
from support.ranks import run_ranks, run_ranks_to_their_ends

REPORT = "ranks have waited for others"
AFTERWARDS = 3
# With a shutdown time of 3 s, which all tests of a stopped rank set.
LATEST_ERROR_SECONDS = 7


def knobs(plane: str, *, warning: float = 0.5, shutdown: float = 0, stacks: int = 0) -> dict[str, str]:
    return {
        "HOROVODISH_PLANE": plane,
        "HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": str(warning),
        "HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": str(shutdown),
        "HOROVODISH_STALL_CHECK_STACKS": str(stacks),
    }


def results(outcomes: list[Outcome]) -> list[str]:
    """What the ranks returned. They leave MPI without finalizing, at which mpirun would end the slower ones."""
    for outcome in outcomes:
        assert outcome.ended == "returned", outcome.output
    return [outcome.result for outcome in outcomes]


def count_sheep() -> None:
    """What the lagging rank does instead of submitting."""
    wait_for_output(0, "'x' was submitted by")


def lag_until_it_is_reported(laggard: int) -> str:
    hvd.init()
    total = sum(range(hvd.size()))
    assert hvd.allreduce(np.array(hvd.rank()), op=hvd.Sum, name="before") == total
    basics.engine().begin_step()
    if hvd.rank() == laggard:
        count_sheep()
    elif hvd.rank() == 2:
        basics.engine().begin_step()
    handles = [hvd.allreduce_async(np.full(3, hvd.rank()), op=hvd.Sum, name=name) for name in ("x", "y")]
    for handle in handles:
        np.testing.assert_array_equal(handle.wait(), np.full(3, total))
    hvd.barrier()
    return wait_for_output(hvd.rank(), "")


@pytest.mark.parametrize(("laggard", "plane"), [(0, "auto"), (1, "auto"), (0, "mpi_ring")])
def test_one_report_says_who_lags_and_where(laggard: int, plane: str) -> None:
    env = knobs(plane, warning=2.0, stacks=1)
    outputs = run_ranks(lag_until_it_is_reported, 3, args=(laggard,), env=env)
    others = "ranks 1, 2" if laggard == 0 else "ranks 0, 2"
    assert outputs[0].count("'x' was submitted by") == 1
    for tensor in ("x", "y"):
        assert re.search(rf"'{tensor}' was submitted by {others} but not by rank {laggard}[;.]", outputs[0])
    assert (
        f"rank {laggard} is in step 1 and has nothing under way; it last submitted 'before', and nothing for "
        in outputs[0]
    )
    assert re.search(r"rank 2 is in step 2 and waits for '[xy]' and 1 more", outputs[0])
    assert "ranks wait without a limit: --stall-check-shutdown-time-seconds sets one" in outputs[0]
    for rank, output in enumerate(outputs):
        assert ("in count_sheep" in output) == (rank == laggard), "the laggard alone shows its stacks"
        assert (f"other ranks wait for rank {rank}. The Python stacks of its threads:" in output) == (rank == laggard)
        assert REPORT not in output or rank == 0


def work_for_long(seconds: float) -> str:
    hvd.init()
    if hvd.rank() == 0:
        time.sleep(seconds)
    hvd.allreduce(np.zeros(3), name="x")
    hvd.barrier()
    return wait_for_output(hvd.rank(), "")


def test_a_rank_that_only_works_for_long_is_not_called_stopped() -> None:
    """The others would say so 1.5 warning times and 3 seconds after they have last heard of rank 0."""
    outputs = run_ranks(work_for_long, 3, args=(6.0,), env=knobs("auto", stacks=1))
    assert [output.count("warning: ranks have waited for others") for output in outputs] == [1, 0, 0]
    assert [output.count("in work_for_long") for output in outputs] == [1, 0, 0]


def join_late(laggard: int) -> str:
    hvd.init()
    if hvd.rank() == laggard:
        wait_for_output(0, "join() was called by")
    hvd.join()
    return wait_for_output(hvd.rank(), "")


@pytest.mark.parametrize("laggard", [0, 1])
def test_ranks_that_have_joined_are_told_who_has_not(laggard: int) -> None:
    outputs = run_ranks(join_late, 3, args=(laggard,), env=knobs("auto", warning=2.0))
    others = "ranks 1, 2" if laggard == 0 else "ranks 0, 2"
    assert outputs[0].count(f"join() was called by {others} but not by rank {laggard}.") == 1
    assert "rank 2 has joined" in outputs[0]
    assert REPORT not in outputs[1] + outputs[2]


def lag_until_all_give_up(laggard: int) -> str:
    hvd.init()
    if hvd.rank() == laggard:
        wait_for_output((laggard + 1) % 3, "gave up")
    handle = hvd.allreduce_async(np.zeros(3), name="x")
    with pytest.raises(hvd.StallError) as raised:
        handle.wait()
    print("gave up", flush=True)
    with pytest.raises(hvd.StallError, match="but not by"):
        hvd.barrier()
    return str(raised.value).split(": ", 1)[1] + wait_for_output(hvd.rank(), "")


@pytest.mark.parametrize(("laggard", "warning", "plane"), [(1, 0.5, "auto"), (0, 0, "mpi_ring"), (1, 0.5, "mpi_ring")])
def test_after_the_shutdown_time_every_rank_raises(laggard: int, warning: float, plane: str) -> None:
    env = knobs(plane, warning=warning, shutdown=3.0)
    told = results(run_ranks_to_their_ends(lag_until_all_give_up, 3, args=(laggard,), env=env))
    reasons = {text.split("gave up")[0].split("horovodish: warning")[0] for text in told}
    assert len(reasons) == 1, reasons
    assert re.search(rf"'x' was submitted by ranks .* but not by rank {laggard}\.", reasons.pop())
    reports = [line for text in told for line in text.splitlines() if "horovodish: warning" in line]
    assert sum("has waited in init()" not in line for line in reports) == (warning > 0), reports
    assert "most recent call first" not in "".join(told)


def resume_when(pid: int, reporter: int, text: str) -> None:
    wait_until_state(pid, "T")
    wait_for_output(reporter, text)
    resume(pid)


def stopped_where(victim: int) -> tuple[int, str]:
    """Who notices that a rank is stopped, and what it prints."""
    return (1, "no answer comes from rank 0: stopped") if victim == 0 else (0, f"rank {victim} does not answer")


def any_rank(happens: bool) -> bool:
    return bool(hvd.allreduce(np.array(happens, np.int8), op=hvd.Max))


def go_on_after_a_stop(victim: int, phase: str) -> bool:
    """The victim stops itself before, or in the middle of, a reduction; whether it did is returned."""
    hvd.init()
    pids = all_pids()
    rescuer = threading.Thread(target=resume_when, args=(pids[victim], *stopped_where(victim)))
    if hvd.rank() == 2:
        rescuer.start()
    stopped = False
    while not any_rank(stopped):
        acts = hvd.rank() == victim
        if acts and phase == "negotiating":
            os.kill(os.getpid(), signal.SIGSTOP)
            stopped = True
        reduction = LargeReduction()
        if acts and phase == "reducing" and reduction.catch():
            os.kill(os.getpid(), signal.SIGSTOP)
            stopped = True
        reduction.finish()
    for _ in range(AFTERWARDS):
        LargeReduction().finish()
    if hvd.rank() == 2:
        rescuer.join()
    return stopped


@pytest.mark.parametrize(
    ("victim", "phase", "plane"),
    [
        (0, "negotiating", "auto"),
        (0, "reducing", "mpi_ring"),
        (1, "reducing", "auto"),
        (1, "negotiating", "mpi_ring"),
    ],
)
def test_a_stopped_rank_is_named_and_may_go_on(victim: int, phase: str, plane: str) -> None:
    stopped = run_ranks(go_on_after_a_stop, 3, args=(victim, phase), env=knobs(plane, shutdown=60))
    assert stopped == [rank == victim for rank in range(3)]


def give_up_on_a_stopped_rank(victim: int, submits_first: bool = False) -> str:
    hvd.init()
    pids = all_pids()
    hvd.barrier()
    submitted = hvd.allreduce_async(np.zeros(3), name="x") if hvd.rank() == victim and submits_first else None
    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif submits_first:
        wait_until_state(pids[victim], "T")  # else it might be done before
    began = time.monotonic()
    try:
        with pytest.raises(hvd.StallError) as raised:
            (submitted or hvd.allreduce_async(np.zeros(3), name="x")).wait()
    finally:
        seconds = time.monotonic() - began
        print("gave up", flush=True)
        if hvd.rank() == (victim + 1) % hvd.size():
            for other in {*range(hvd.size())} - {victim}:
                wait_for_output(other, "gave up")
            resume(pids[victim])
    wait_for_output(victim, "gave up")
    with pytest.raises(hvd.StallError):
        hvd.barrier()
    assert hvd.rank() == victim or seconds < LATEST_ERROR_SECONDS
    return str(raised.value)


@pytest.mark.parametrize(("victim", "plane"), [(0, "auto"), (1, "mpi_ring")])
def test_an_error_follows_after_the_shutdown_time(victim: int, plane: str) -> None:
    env = knobs(plane, warning=0.3, shutdown=3.0)
    told = results(run_ranks_to_their_ends(give_up_on_a_stopped_rank, 3, args=(victim,), env=env))
    _, text = stopped_where(victim)
    for rank in {0, 1, 2} - {victim}:
        assert text in told[rank]


def test_a_root_that_wakes_up_decides_too_late() -> None:
    """What it decides then, of what all had submitted, the others have given up."""
    env = knobs("auto", warning=0.3, shutdown=3.0)
    told = results(run_ranks_to_their_ends(give_up_on_a_stopped_rank, 2, args=(0, True), env=env))
    for text in told:
        assert "no answer comes from rank 0: stopped" in text


def test_a_rank_that_speaks_for_a_host_is_stopped() -> None:
    env = knobs("auto", warning=0.3, shutdown=3.0)
    with hosts(2) as two_hosts:
        outcomes = run_on_hosts_to_their_ends(give_up_on_a_stopped_rank, two_hosts, [2, 2], args=(2,), env=env)
    told = results(outcomes)
    for rank in (0, 1, 2):
        assert "ranks 2, 3 do not answer: stopped" in told[rank]
    assert "no answer comes from rank 0 by way of rank 2: stopped" in told[3]


def submit_after_long_work(work_seconds: float) -> None:
    """A thread that has waited before, and that works while the main thread waits."""
    hvd.allreduce(np.zeros(3), name="first")
    time.sleep(work_seconds)
    hvd.allreduce(np.zeros(3), name=f"x{1 - hvd.rank()}")


def wait_for_different_tensors(work_seconds: float) -> str:
    hvd.init()
    other_thread = threading.Thread(target=submit_after_long_work, args=(work_seconds,))
    other_thread.start()
    hvd.allreduce(np.zeros(3), name=f"x{hvd.rank()}")  # waits for the other rank's other thread
    other_thread.join()
    tensors, name = ([np.zeros(3), np.zeros(4)], "batch 7") if hvd.rank() == 0 else ([np.zeros(3)], "metric")
    with pytest.raises(hvd.StallError) as raised:
        hvd.grouped_allreduce(tensors, name=name)
    with pytest.raises(hvd.StallError):
        hvd.barrier()
    return str(raised.value)


def test_ranks_that_wait_for_each_other_for_ever_raise() -> None:
    """With a shutdown time of 0, but not while a thread works that may submit what is missing."""
    env = knobs("auto", warning=60)
    for text in results(run_ranks_to_their_ends(wait_for_different_tensors, 2, args=(8.0,), env=env)):
        assert "every rank waits, but not for the same tensors, so none can continue" in text
        assert "'batch 7' was submitted by rank 0 but not by rank 1" in text
        assert re.search(r"'metric.*' was submitted by rank 1 but not by rank 0", text)
        assert "hvd.join()" in text
        assert "if rank == 0:" in text


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


DELAYS: dict[str, Callable[[float], object]] = {
    "computes": compute,
    "sleeps in C": lambda seconds: ctypes.CDLL(None).sleep(int(seconds)),
    "waits for a child": lambda seconds: subprocess.run(["sleep", str(seconds)], check=True),
}


def delay_then_submit(delay: str) -> None:
    """A thread that has used no collective before."""
    DELAYS[delay](10.0)
    hvd.allreduce(np.zeros(3), name=f"x{1 - hvd.rank()}")


def wait_for_threads_that_begin(delay: str) -> None:
    hvd.init()
    other_thread = threading.Thread(target=delay_then_submit, args=(delay,))
    other_thread.start()
    hvd.allreduce(np.zeros(3), name=f"x{hvd.rank()}")
    other_thread.join()


@pytest.mark.soak
@pytest.mark.parametrize("delay", DELAYS)
def test_a_thread_may_be_late_with_its_first_collective(delay: str) -> None:
    run_ranks(wait_for_threads_that_begin, 2, args=(delay,), env=knobs("auto", warning=60))


def submit_without_waiting(work_seconds: float, ends: threading.Event) -> None:
    """A thread as TensorFlow has them: it submits and never waits. It works while the main thread waits."""
    hvd.allreduce_async(np.zeros(3), name="first")
    time.sleep(work_seconds)
    if not ends.is_set():
        hvd.allreduce_async(np.zeros(3), name=f"x{1 - hvd.rank()}")
    ends.wait()


def wait_while_another_thread_computes(work_seconds: float) -> str:
    hvd.init()
    ends = threading.Event()
    other_thread = threading.Thread(target=submit_without_waiting, args=(work_seconds, ends))
    other_thread.start()
    hvd.allreduce(np.zeros(3), name=f"x{hvd.rank()}")  # waits for the other rank's other thread
    # Now that thread sleeps until another one wakes it.
    with pytest.raises(hvd.StallError) as raised:
        hvd.allreduce(np.zeros(3), name=f"y{hvd.rank()}")
    ends.set()
    other_thread.join()
    return str(raised.value)


@pytest.mark.soak
def test_a_thread_that_never_waits_may_compute_what_all_wait_for() -> None:
    """For longer than the warning time, and also while it sleeps for a time."""
    env = knobs("auto", warning=1.0)
    for text in results(run_ranks_to_their_ends(wait_while_another_thread_computes, 2, args=(10.0,), env=env)):
        assert "every rank waits, but not for the same tensors, so none can continue" in text
        assert "'y0' was submitted by rank 0 but not by rank 1" in text


def lag_without_a_check() -> str:
    hvd.init()
    names = ("a", "b") if hvd.rank() == 0 else ("b", "a")
    rest = []
    before = signal.signal(signal.SIGUSR1, lambda *_: rest.append(hvd.allreduce_async(np.zeros(3), name=names[1])))
    wait_then_signal = 'until grep -q "every rank waits" "$0"; do sleep 0.1; done; kill -USR1 "$1"'
    with subprocess.Popen(["sh", "-c", wait_then_signal, str(output_of(0)), str(os.getpid())]):
        hvd.allreduce(np.zeros(3), name=names[0])
    rest[0].wait()
    signal.signal(signal.SIGUSR1, before)
    hvd.barrier()
    return wait_for_output(hvd.rank(), "")


def test_without_the_stall_check_it_is_a_warning() -> None:
    outputs = run_ranks(lag_without_a_check, 2, env={"HOROVODISH_STALL_CHECK": "0"})
    assert [output.count("every rank waits, but not for the same tensors") for output in outputs] == [1, 0]
