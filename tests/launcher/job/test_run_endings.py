"""How jobs end, on real ranks: the exit status, the closing line, and that every process has ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

ENDS_WITHIN_SECONDS = 30
WAITS = "\nsignal.pause()\n"
"""The other ranks would wait for ever."""

# As horovodish.init() does it.
HOOK = """
from horovodish import errors
from horovodish.launch import failures
failures.watch(lambda: rank, lambda: "", lambda: False, lambda text: None)
"""


def test_every_rank_runs_in_one_world_though_there_are_more_ranks_than_cores(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(5, "print(rank, comm.allreduce(1), os.environ['HOROVODISH_NP'])")
    assert job.finish() == 0
    assert sorted(job.stdout.lines) == [f"{rank} 5 5" for rank in range(5)]
    (notice,) = job.stderr.lines
    assert re.fullmatch(r"horovodish: 5 ranks on \d+ cores: OMP_NUM_THREADS=\d+ for each; set it to .*", notice)


def test_the_folder_of_the_run_may_be_gone_before_the_last_words(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(
        2, "import shutil\nif rank: shutil.rmtree(os.environ['HOROVODISH_RUN_DIR']); os._exit(3)" + WAITS
    )
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 3
    assert "horovodish: rank 1 on" in job.stderr.lines[-1]


@pytest.mark.parametrize(
    ("how", "status", "closing_line"),
    [
        ("os._exit(3)", 3, "failed with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by signal 9 (SIGKILL)"),
        ("os.abort()", 134, "was killed by signal 6 (SIGABRT)"),
    ],
)
def test_the_first_failing_rank_ends_the_job_and_is_named(
    launch_ranks: Callable[..., Any], how: str, status: int, closing_line: str
) -> None:
    job = launch_ranks(3, f"print('ready')\ncomm.Barrier()\nif rank == 1:\n    {how}{WAITS}")
    job.stdout.wait_for("ready", 3)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == status
    closing = [line for line in job.stderr.lines if line.startswith("horovodish: rank")]
    assert len(closing) == 1
    assert closing[0].startswith("horovodish: rank 1 on ")
    assert closing_line in closing[0]


def test_a_rank_that_raises_ends_the_job_though_mpi_would_wait(launch_ranks: Callable[..., Any]) -> None:
    code = "print('ready')\ncomm.Barrier()\nif rank == 1:\n    raise ValueError('no such thing')"
    job = launch_ranks(3, HOOK + code + WAITS)
    job.stdout.wait_for("ready", 3)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    said = "\n".join(job.stderr.lines)
    assert said.count("Traceback (most recent call last)") == 1
    assert job.stderr.lines[-1].endswith("failed with exit status 1: ValueError: no such thing")


def test_the_cause_is_named_not_the_rank_that_noticed_first(launch_ranks: Callable[..., Any]) -> None:
    code = """
pids = comm.allgather(os.getpid())
print('ready')
comm.Barrier()
if rank == 0:
    sys.excepthook(errors.RankLostError, errors.RankLostError('rank 1 is gone'), None)
    os.kill(pids[1], signal.SIGALRM)
    os._exit(1)
"""
    job = launch_ranks(2, HOOK + code + WAITS)
    job.stdout.wait_for("ready", 2)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 128 + signal.SIGALRM
    assert "rank 1 on " in job.stderr.lines[-1]
    assert job.stderr.lines[-1].endswith("was killed by signal 14 (SIGALRM)")


def test_ranks_stay_on_this_host_inside_an_allocation_when_they_are_told_to(launch: Callable[..., Any]) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    nodes = dict.fromkeys(("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "no-such-host-a,no-such-host-b")
    job = launch("run", "-np", "3", "-H", "localhost:3", "echo", "here", env={**slurm, **nodes})
    assert job.finish() == 0
    assert job.stdout.lines == ["here"] * 3


def test_ranks_without_mpi_can_fail_too(launch: Callable[..., Any]) -> None:
    job = launch("run", "-np", "2", "sh", "-c", "exit 4")
    assert job.finish() == 4


def test_mpi_abort(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, f"comm.Barrier()\nif rank == 1:\n    comm.Abort(5){WAITS}")
    assert job.finish() == 5
    assert "MPI_ABORT" in "\n".join(job.stderr.lines).upper()
    assert "vanished" not in "\n".join(job.stderr.lines)


def test_a_rank_that_leaves_without_finalizing(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, f"comm.Barrier()\nif rank == 1:\n    os._exit(0){WAITS}")
    assert job.finish() == 1
    assert "a rank left with exit status 0 but without MPI_Finalize" in job.stderr.lines[-1]
    assert len(job.stderr.lines) == 2


@pytest.mark.parametrize("at_sigterm", ["SIG_DFL", "SIG_IGN"])
def test_what_a_failed_rank_has_started_is_ended(launch_ranks: Callable[..., Any], at_sigterm: str) -> None:
    code = f"""
if rank == 1:
    signal.signal(signal.SIGTERM, signal.{at_sigterm})
    worker = os.fork()
    if worker == 0:
        signal.pause()
    os._exit(3)
"""
    assert launch_ranks(2, code + WAITS).finish(within=ENDS_WITHIN_SECONDS) == 3
