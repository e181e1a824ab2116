"""Signals to the launcher, on real ranks, down to SIGKILL: no rank outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

ENDS_WITHIN_SECONDS = 30
WAITS = "print('ready')\nsignal.pause()\n"


def test_ctrl_c_interrupts_the_ranks(launch_ranks: Callable[..., Any]) -> None:
    code = """
try:
    print('ready')
    signal.pause()
except KeyboardInterrupt:
    print('interrupted')
"""
    job = launch_ranks(2, code)
    job.stdout.wait_for("ready", 2)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 130
    assert job.stdout.lines.count("interrupted") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_do_not_listen_are_killed(launch_ranks: Callable[..., Any], number: signal.Signals) -> None:
    deaf = "for number in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(number, signal.SIG_IGN)\n"
    job = launch_ranks(2, deaf + "print('ready')\nwhile True:\n    signal.pause()\n", mpi=False)
    job.stdout.wait_for("ready", 2)
    job.process.send_signal(number)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 128 + number


def test_a_second_ctrl_c_kills(launch_ranks: Callable[..., Any]) -> None:
    code = "def count(*_):\n    print('counted')\nsignal.signal(signal.SIGINT, count)\nprint('ready')\n"
    job = launch_ranks(2, code + "while True:\n    signal.pause()\n", mpi=False)
    job.stdout.wait_for("ready", 2)
    job.process.send_signal(signal.SIGINT)
    job.stdout.wait_for("counted", 2)
    job.process.send_signal(signal.SIGINT)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 130


def test_a_killed_launcher_leaves_nothing_behind(launch_ranks: Callable[..., Any]) -> None:
    # Two processes write into one pipe: each line must be a single write.
    code = """
if os.fork():
    os.write(1, os.environ['HOROVODISH_RUN_DIR'].encode() + b"\\n")
os.write(1, b"ready\\n")
signal.pause()
"""
    job = launch_ranks(2, code)
    job.stdout.wait_for("ready", 4)
    (folder,) = {line for line in job.stdout.lines if line != "ready"}
    assert len(job.processes()) >= 1 + 1 + 2 * 3, "launcher, mpirun, and per rank supervisor, rank and worker"
    job.process.kill()
    assert job.finish(within=ENDS_WITHIN_SECONDS) == -signal.SIGKILL
    assert not Path(folder).exists()


def test_a_killed_mpirun_ends_the_job(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, WAITS, mpi=False)
    job.stdout.wait_for("ready", 2)
    (mpirun,) = children(job.process.pid)
    os.kill(mpirun, signal.SIGKILL)
    assert job.finish(within=ENDS_WITHIN_SECONDS) == 137
    assert job.stderr.lines[-1].endswith(" was killed by signal 9 (SIGKILL)")


def test_a_killed_supervisor_ends_the_job(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, "print(os.getppid())\n" + WAITS, mpi=False)
    job.stdout.wait_for("ready", 2)
    supervisor = next(int(line) for line in job.stdout.lines if line != "ready")
    os.kill(supervisor, signal.SIGKILL)
    assert job.finish(within=ENDS_WITHIN_SECONDS) != 0


SIGNAL = "signal.pthread_sigmask(signal.SIG_BLOCK, [{0}])\nprint('ready')\nsignal.sigwait([{0}])\nprint('{0}')\n"
"""Code of a rank that waits for a signal."""


def test_other_signals_reach_the_ranks(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, SIGNAL.format("signal.SIGUSR1"), mpi=False)
    job.stdout.wait_for("ready", 2)
    job.process.send_signal(signal.SIGUSR1)
    assert job.finish() == 0
    assert job.stdout.lines.count("signal.SIGUSR1") == 2


def test_ctrl_z_stops_the_ranks_until_the_launcher_goes_on(launch_ranks: Callable[..., Any]) -> None:
    job = launch_ranks(2, SIGNAL.format("signal.SIGCONT"), mpi=False)
    job.stdout.wait_for("ready", 2)
    job.process.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, job.process.pid, os.WSTOPPED)
    job.process.send_signal(signal.SIGCONT)
    assert job.finish() == 0
    assert job.stdout.lines.count("signal.SIGCONT") == 2


@pytest.mark.usefixtures("threads_are_chosen")
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_stuck_reader_does_not_keep_a_launcher_that_is_told_to_end(has_ended: bool) -> None:
    afterwards = "pass" if has_ended else "signal.pause()"
    code = f"import signal; print('x' * 200_000, flush=True); {afterwards}"  # more than the pipe takes
    command = [sys.executable, "-m", "horovodish.launcher", "run", "-np", "1", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as launcher:
        try:
            assert launcher.stdout is not None
            assert os.read(launcher.stdout.fileno(), 1) == b"x"
            if has_ended:
                _, running = psutil.wait_procs(psutil.Process(launcher.pid).children(), ENDS_WITHIN_SECONDS)
                assert not running
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(ENDS_WITHIN_SECONDS) == 128 + signal.SIGTERM
        finally:
            launcher.kill()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
