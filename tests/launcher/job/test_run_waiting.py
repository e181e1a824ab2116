"""Ranks that make others wait outside of collectives, and ranks that leave, on real ranks: who is named."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

ENDS_WITHIN_SECONDS = 40
SOON = {
    "HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "1",
    "HOROVODISH_STALL_CHECK_SHUTDOWN_TIME_SECONDS": "4",
}
PRELUDE = """
import numpy as np
import horovodish as hvd
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
def stop(pid):
    os.write(1, f"stopped {os.getpid()}\\n".encode())
    os.kill(pid, signal.SIGSTOP)
"""


@pytest.mark.parametrize(("leaver", "late"), [(0, 1.5), (1, 0)])
def test_a_rank_that_ends_before_init_does_not_keep_the_others_there(
    launch_ranks: Callable[..., Any], leaver: int, late: float
) -> None:
    """Whether they have begun to wait when it ends or do so later."""
    leaves = f"if rank == {leaver}: sys.exit(0)\nimport time; time.sleep({late})\n"
    job = launch_ranks(2, PRELUDE + leaves + "hvd.init()", mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    said = rf"horovodish: rank {leaver} on \S+ ended with exit status 0 without init\(\), where rank {1 - leaver} waits"
    assert re.match(said, job.stderr.lines[-1]), job.stderr.lines
    assert not any("PMIX" in line for line in job.stderr.lines), job.stderr.lines


ALONE = """
from pathlib import Path
os.environ["HOROVODISH_SPIN_US"] = str(rank)  # each rank refuses that
try:
    hvd.init()
except hvd.SettingError:
    phases = Path(os.environ["HOROVODISH_RUN_DIR"], f"rank-{rank}.phases").read_text().split()[::2]
    os.write(1, f"{' '.join(phases)}\\n".encode())
"""


def test_a_rank_whose_init_raised_is_not_taken_for_one_that_waits_there(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, PRELUDE + ALONE, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 0, job.stderr.lines
    assert job.stdout.lines == ["init stopped"] * 2


# A forked child that ends as a script does, a started one that is refused, and a job that a rank starts.
CHILDREN = """
import subprocess
from pathlib import Path
hvd.init()
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
refused = "import horovodish as hvd\\ntry: hvd.init()\\nexcept hvd.ForkedProcessError: print('refused', flush=True)"
subprocess.run([sys.executable, "-c", refused], check=True)
followed = "from horovodish.launch import run_folder; print(run_folder.is_followed(), flush=True)"
subprocess.run([sys.executable, "-c", followed], check=True)
phases = Path(os.environ["HOROVODISH_RUN_DIR"], f"rank-{rank}.phases").read_text().split()
assert phases == ["init", str(os.getpid()), "running", str(os.getpid())], phases
"""


def test_processes_that_a_rank_starts_do_not_say_how_far_it_is(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, PRELUDE + CHILDREN, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 0, job.stderr.lines
    assert sorted(job.stdout.lines) == ["False"] * 2 + ["refused"] * 2


def test_ranks_that_do_not_use_it_end_when_they_like(launch: Callable[..., Any]) -> None:
    job = launch("run", "-np", "2", "sh", "-c", "case $OMPI_COMM_WORLD_RANK$PMI_RANK in 1) sleep 6;; esac", env=SOON)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 0
    assert not any("waited" in line for line in job.stderr.lines), job.stderr.lines


WHERE = {
    "before init": "if rank == 1: stop(os.getpid())\nhvd.init()",
    "after shutdown": "hvd.init()\nhvd.barrier()\nhvd.shutdown()\nif rank == 1: stop(os.getpid())",
    "with its supervisor": "hvd.init()\nhvd.barrier()\nif rank == 1: stop(os.getppid())",
}


@pytest.mark.parametrize(
    "where", ["before init", "after shutdown", pytest.param("with its supervisor", marks=pytest.mark.soak)]
)
def test_a_stopped_rank_is_named_and_the_job_ends_after_the_shutdown_time(
    launch_ranks: Callable[..., Any], where: str
) -> None:
    job = launch_ranks(2, PRELUDE + WHERE[where], mpi=False, env=SOON)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    process = next(line.split()[1] for line in job.stdout.lines if line.startswith("stopped"))
    what = "does not answer: its supervisor" if "supervisor" in where else f"process {process} is stopped"
    named = [line for line in job.stderr.lines if re.search(rf"rank 0 (has waited|ended) .*: rank 1 on .*{what}", line)]
    assert named, job.stderr.lines
    assert job.stderr.lines[-1] == named[-1]


def test_a_rank_that_others_wait_for_may_come_late(launch_ranks: Callable[..., Any]) -> None:
    warned = {"HOROVODISH_STALL_CHECK_WARNING_TIME_SECONDS": "1"}
    job = launch_ranks(2, PRELUDE + WHERE["before init"], mpi=False, env=warned)
    while not any("has not called init()" in line for line in job.stderr.lines):
        assert job.process.poll() is None, job.stderr.lines
        os.sched_yield()
    process = next(line.split()[1] for line in job.stdout.lines if line.startswith("stopped"))
    os.kill(int(process), signal.SIGCONT)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 0, job.stderr.lines


ENDS = {
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "import horovodish as hvd\nhvd.rank()": "NotInitializedError: .* call hvd.init\\(\\) before rank\\(\\)",
    "import horovodish as hvd\nraise ValueError('no data')": "ValueError: no data",
}


@pytest.mark.parametrize("script", ENDS)
def test_a_failure_before_init_has_its_reason_in_the_last_line(launch_ranks: Callable[..., Any], script: str) -> None:
    job = launch_ranks(2, script, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    assert re.fullmatch(
        rf"horovodish: rank [01] on \S+ failed with exit status 1: {ENDS[script]}", job.stderr.lines[-1]
    )
    if "horovodish" in script:
        assert job.stderr.lines.count("Traceback (most recent call last):") == 1


GOES_ON = "hvd.init()\nprint('ready')\nwhile True: hvd.allreduce(np.zeros(3), name='goes on')"


def test_a_rank_that_leaves_in_the_middle_is_named(launch_ranks: Callable[..., Any]) -> None:
    code = GOES_ON + "; rank == 1 and os._exit(0)"
    job = launch_ranks(2, PRELUDE + code, mpi=False)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 1
    assert re.match(
        r"horovodish: rank 1 on \S+ ended with exit status 0 while other ranks needed it", job.stderr.lines[-1]
    )


def test_the_last_line_after_a_signal_to_the_launcher_is_about_that(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, PRELUDE + GOES_ON, mpi=False)
    job.stdout.wait_for("ready", 2)
    job.process.terminate()
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 128 + signal.SIGTERM
    assert job.stderr.lines[-1] == "horovodish: the job was ended by signal 15 (SIGTERM)"


JAX = """
import jax, jax.numpy as jnp, horovodish.jax as hvd
hvd.init()
step = jax.jit(lambda x: hvd.allreduce(x, name="g") * 0.5)
x = jnp.ones(1000)
for i in range(10**6):
    x = step(x)
    if i == 200 and hvd.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
    x.block_until_ready()
"""
TENSORFLOW = """
import tensorflow as tf, horovodish.tensorflow as hvd
hvd.init()
step = tf.function(lambda x: hvd.allreduce(x, name="g") * 0.5)
x = tf.ones(1000)
for i in range(10**6):
    x = step(x)
    if i == 200 and hvd.rank() == 1: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("framework", "code"), [("jax", JAX), pytest.param("tensorflow", TENSORFLOW, marks=pytest.mark.soak)]
)
def test_a_framework_that_wraps_the_error_of_a_survivor_does_not_hide_the_cause(
    launch_ranks: Callable[..., Any], framework: str, code: str
) -> None:
    pytest.importorskip(framework)
    job = launch_ranks(2, code, mpi=False)
    assert job.finish(within=3 * ENDS_WITHIN_SECONDS) == 137, job.stderr.lines
    assert re.match(r"horovodish: rank 1 on \S+ was killed by signal 9 \(SIGKILL\)", job.stderr.lines[-1])
    assert any(line.startswith("horovodish: rank 0 failed because a rank was lost: ") for line in job.stderr.lines)
    assert not any("Traceback" in line for line in job.stderr.lines)
