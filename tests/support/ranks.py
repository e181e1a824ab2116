"""`run_ranks`: run a function on several real ranks, and show what each of them did when one does not succeed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.mpi_command import is_open_mpi, mpi_command
from support.outcome import Outcome
from support.world import Call, World

_SHOWN_CHARACTERS = 6000
_MOST_IDLE_RANKS = 12

_idle: dict[tuple[tuple[str, ...], str, str], World] = {}
"""Worlds whose ranks wait for the next call, by the command that has started them, the folder of their framework and
Keras's backend, which Keras reads when it is imported; the one that was used last comes last."""


class RanksFailedError(AssertionError):
    """At least one rank did not return; the message shows how every rank ended and what it printed.

    Attributes:
        outcomes: how each rank ended, by rank.
    """

    def __init__(self, message: str, outcomes: list[Outcome]):
        super().__init__(message)
        self.outcomes = outcomes


def run_ranks(
    function: Callable[..., Any],
    np: int,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    command: list[str] | None = None,
    fresh: bool = False,
    begin: bool = False,
) -> list[Any]:
    """Call `function(*args)` on `np` processes that MPI has started, and give the results by rank.

    The processes may have called other functions before, and shut down since.

    Args:
        function: of module level; each rank imports its file. It calls `init()` itself; `shutdown()` follows by
            itself, and a thread or shared memory of the engine that survives it fails the rank. What it changes in its
            process, it changes back; but for variables, the working directory and threads, which are seen to.
        np: the number of ranks.
        args: what to call it with; anything that can be pickled.
        timeout: seconds until the ranks that still run count as hung.
        env: variables to set in the ranks besides this process's. The settings of horovodish, which it reads in
            `init()`, are set for the call; with any other one the processes are fresh.
        command: starts `np` times the program that is appended to it; MPI's launcher when not given.
        fresh: whether the processes are new ones that end with this call: for what matters before the first `init()`
            or at the end of a process, and where something stays changed.
        begin: whether each rank calls `init()` before the function.

    Returns:
        What the function returned, by rank; anything that can be pickled.

    Raises:
        RanksFailedError: a rank raised, died or hung. The others are ended `GRACE_SECONDS` later.
        AssertionError: a process or shared memory was left behind.
    """
    check(function)
    env = env or {}
    command = command or mpi_command(np, survivors=False)
    if fresh or not all(name.startswith("HOROVODISH_") for name in env):
        world = World(command, np, env, stops_at_failure=True)
        outcomes = world.call(Call(function, args, {}, begin), timeout, is_last=True)
    else:
        kind = (tuple(command), framework_of(function), os.environ.get("KERAS_BACKEND", ""))
        world = _idle.pop(kind, None) or World(command, np, {}, stops_at_failure=True)
        outcomes = world.call(Call(function, args, env, begin), timeout, is_last=False)
        if not world.is_over:
            _idle[kind] = world
            while sum(world.size for world in _idle.values()) > _MOST_IDLE_RANKS:
                _idle.pop(next(iter(_idle))).leave()
    if any(outcome.ended != "returned" for outcome in outcomes):
        raise RanksFailedError(_report(function.__name__, outcomes, world.mpi_output), outcomes)
    return [outcome.result for outcome in outcomes]


def let_idle_ranks_leave(word: str = "") -> None:
    """Ends the worlds that wait for the next call, if their command has this word."""
    for kind in list(_idle):
        if not word or word in kind[0]:
            _idle.pop(kind).leave()


def run_ranks_to_their_ends(
    function: Callable[..., Any],
    np: int,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    command: list[str] | None = None,
) -> list[Outcome]:
    """As `run_ranks` with fresh processes, but a rank that fails does not end the others: for what survivors see.

    Skips the test over MPICH, whose mpiexec ends all ranks when one of them dies.

    Returns:
        How each rank ended, by rank. What mpirun has printed follows the output of one that died: it may tell why.
    """
    check(function)
    if not is_open_mpi():
        pytest.skip("MPICH's mpiexec ends all ranks when one of them dies: make test runs it over Open MPI")
    command = command or mpi_command(np, survivors=True)
    world = World(command, np, env or {}, stops_at_failure=False)
    outcomes = world.call(Call(function, args, {}, begin=False), timeout, is_last=True)
    of_mpirun = _part(f"mpirun, which ended with status {world.mpi_status}", world.mpi_output)
    return [
        replace(outcome, output=f"{outcome.output}\n{of_mpirun}") if outcome.ended == "died" else outcome
        for outcome in outcomes
    ]


def framework_of(function: Callable[..., Any]) -> str:
    """The folder of tests/frameworks that has the file of a function: tests in one folder import the same framework."""
    path = Path(inspect.getfile(function))
    return path.parent.name if "frameworks" in path.parts else ""


def check(function: Callable[..., Any]) -> None:
    if "<locals>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is not of module level, so no other process can find it")


def _report(name: str, outcomes: list[Outcome], mpi_output: str) -> str:
    parts = [f"{name}: " + ", ".join(f"rank {outcome.rank} {outcome.ended}" for outcome in outcomes)]
    parts += [_part(f"rank {outcome.rank} {outcome.ended}", outcome.output) for outcome in outcomes]
    return "\n".join([*parts, _part("mpirun", mpi_output)])


def _part(title: str, text: str) -> str:
    end = text if len(text) <= _SHOWN_CHARACTERS else f"... {text[-_SHOWN_CHARACTERS:]}"
    return f"--- {title}:\n{end}"
