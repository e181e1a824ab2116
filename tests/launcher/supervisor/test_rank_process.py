"""Which process a supervisor takes for its rank: what its children and its wrapper do says nothing about the rank."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horovodish.launcher.supervisor.supervisor import Supervisor, waits_for_a_child
from support.processes import stop, wait_until

# Starts a process that starts another one, and goes on without waiting for them.
FAMILY = """
import os, signal
if os.fork() == 0 and os.fork():
    pass
signal.pause()
"""
LINE = "sleep 1000; true"
"""A shell's: without what follows, the shell would become what it starts."""

Started = Callable[..., int]


@pytest.fixture
def started() -> Iterator[Started]:
    """A function that starts a process in a group of its own, as a supervisor does; returns its process id."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> int:
        running.append(subprocess.Popen(command, start_new_session=True))
        return running[-1].pid

    yield start
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answer(pid: int, *phases: str) -> tuple[int, str]:
    """What the supervisor of the process says that its rank does."""
    supervisor = object.__new__(Supervisor)  # a whole one takes the signals of its process
    supervisor.pid = pid
    supervisor.phases = list(phases)
    return supervisor.rank_process()


def child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: bool(children.read_text()))
    return int(children.read_text().split()[0])


PHASES: list[tuple[str, ...]] = [(), ("init",), ("init", "running"), ("running", "shutdown"), ("stopped", "exit")]


@pytest.mark.parametrize("phases", PHASES, ids=str)
def test_stopped_children_do_not_count(started: Started, phases: tuple[str, ...]) -> None:
    """Such as a worker of a data loader, and what that has started."""
    rank = started(sys.executable, "-c", FAMILY)
    child = child_of(rank)
    grandchild = child_of(child)
    wait_until(lambda: answer(rank) == (rank, "S"))
    for pid in (grandchild, child):
        stop(pid)
        assert answer(rank, *(f"{phase} {rank}" for phase in phases)) == (rank, "S")


@pytest.mark.parametrize("phases", PHASES, ids=str)
def test_a_rank_that_is_stopped_counts_in_every_phase(started: Started, phases: tuple[str, ...]) -> None:
    rank = started(sys.executable, "-c", FAMILY)
    child_of(child_of(rank))
    stop(rank)
    assert answer(rank, *(f"{phase} {rank}" for phase in phases)) == (rank, "T")


@pytest.mark.skipif(not Path("/proc/self/wchan").exists(), reason="this kernel does not say what a process waits for")
@pytest.mark.parametrize("line", [LINE, "sleep 1000 | cat; true", "sh -c 'sleep 1000; true'; true"])
def test_before_any_phase_it_is_what_the_wrapper_waits_for(started: Started, line: str) -> None:
    shell = started("sh", "-c", line)
    parent, script = shell, child_of(shell)
    if "-c" in line:
        parent, script = script, child_of(script)
    # A shell makes its child by vfork(), and one that is stopped before it runs its program holds the shell in that.
    wait_until(lambda: waits_for_a_child(shell) and waits_for_a_child(parent))
    assert answer(shell) == (shell, "S")
    stop(script)
    wait_until(lambda: answer(shell) == (script, "T"))


def test_a_wrapper_that_is_stopped_while_its_script_goes_on(started: Started) -> None:
    shell = started("sh", "-c", LINE)
    script = child_of(shell)
    wait_until(lambda: answer(shell, f"init {script}") == (script, "S"))  # it has begun to sleep
    stop(shell)
    assert answer(shell, f"init {script}") == (script, "S")
    stop(script)
    assert answer(shell, f"init {script}") == (script, "T")
    assert answer(shell) == (shell, "T"), "nothing says yet which of them is the rank"


def test_after_the_script_it_is_the_wrapper_again(started: Started) -> None:
    shell = started("sh", "-c", "sleep 0; sleep 1000; true")
    ended = subprocess.Popen(["true"])
    ended.wait()
    wait_until(lambda: answer(shell, f"exit {ended.pid}") == (shell, "S"))
    stop(shell)
    assert answer(shell, f"exit {ended.pid}") == (shell, "T")


def test_a_rank_that_has_ended(started: Started) -> None:
    rank = started("true")
    wait_until(lambda: answer(rank, f"exit {rank}") == (rank, "Z"))
