"""Elastic jobs on two hosts, one of which is lost: it falls silent, is heard no more, or loses mpirun's daemon."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.elastic import ObjectState
from support.elastic import Ended, Scene, run_elastic
from support.hosts import Hosts, hosts
from support.midway import LargeReduction
from support.orphans import parent

STEPS = 40
LENGTH = 70_001


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as made:
        yield made


def train_with(scene: Scene, before_step: Callable[[ObjectState], None]) -> Any:
    """The sums are exact and do not depend on the ranks."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < STEPS:
            before_step(state)
            state.sum += hvd.allreduce(np.full(LENGTH, float(state.step)), name="gradient")
            state.step += 1
            state.commit()

    state = ObjectState(step=0, sum=np.zeros(LENGTH))
    train(state)
    assert state.sum.tolist() == [float(sum(range(STEPS)))] * LENGTH
    return scene.start, hvd.size(), state.step


def lose_a_host(scene: Scene, fault: str, other: str, slots: str) -> Any:
    """The last process commits a fault from its host."""

    def before_step(state: ObjectState) -> None:
        if scene.me == 3 and state.step == 5 and scene.first_time(fault):
            if slots:
                Path(slots).write_text(f"{other}:4\n")
            commit_fault(scene, fault, other)
        while fault == "daemon" and scene.start == 0 and state.step == STEPS - 1:
            state.commit()  # until these processes are told to end, which takes longer than the steps

    return train_with(scene, before_step)


def commit_fault(scene: Scene, fault: str, other: str) -> None:
    scene.fired(fault)
    match fault:
        case "down":
            subprocess.run(["ip", "link", "set", "e0", "down"], check=True)
        case "one way":  # what this host sends goes to nobody
            nobody = ["lladdr", "02:00:00:00:00:99", "dev", "e0", "nud", "permanent"]
            subprocess.run(["ip", "neigh", "replace", other, *nobody], check=True)
        case "daemon":
            os.kill(parent(os.getppid()), signal.SIGKILL)  # of mpirun; it has started the supervisor


def die_in_an_allreduce(scene: Scene, victims: dict[str, int]) -> Any:
    """At a step each, processes die that have a part of a sum: chunks are within both hosts and between them."""

    def before_step(state: ObjectState) -> None:
        victim = victims.get(str(state.step))
        is_first = scene.first_time(f"step {state.step}")
        while victim is not None and is_first:  # until it is caught in the middle
            reduction = LargeReduction()
            if scene.me == victim and reduction.catch():
                scene.die("reducing")
            reduction.finish()

    return train_with(scene, before_step)


def run_on(on: Hosts, folder: Path, fault: str, *flags: str, slots: str = "") -> Ended:
    away = ["ip", "netns", "exec", on.name(1), "ip"]

    def repair() -> None:
        """Reconnects the second host, so that its processes hear that the job has ended."""
        subprocess.run([*away, "link", "set", "e0", "up"], check=True)
        subprocess.run([*away, "neigh", "flush", "all", "nud", "permanent"], check=True)

    flags = (*flags, "--host-timeout", "2", "--launch-agent", str(on.agent))
    arguments = (fault, on.address(0), slots)
    return run_elastic(lose_a_host, folder, None, *arguments, flags=flags, inside=on.inside(0), at_end=repair)


def places(on: Hosts) -> str:
    return ",".join(f"{on.address(host)}:2" for host in range(2))


def test_ranks_that_die_in_an_allreduce(two_hosts: Hosts, tmp_path: Path) -> None:
    """One that speaks for its host, and then one that does not."""
    victims = {"5": 2, "10": 1}
    flags = ["--hosts", places(two_hosts), "--min-np", "2", "--launch-agent", str(two_hosts.agent)]
    ended = run_elastic(die_in_an_allreduce, tmp_path, None, victims, flags=flags, inside=two_hosts.inside(0))
    assert ended.status == 0, ended.said
    assert ended.fired == {"reducing 1", "reducing 2"}
    assert ended.said.count("s, in the same processes") == 2, ended.said
    assert ended.results == [(0, 2, STEPS)] * 2, ended.said


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["down", "one way"])
def test_a_host_that_cannot_be_reached(two_hosts: Hosts, fault: str, tmp_path: Path) -> None:
    ended = run_on(two_hosts, tmp_path, fault, "--hosts", places(two_hosts), "--min-np", "2")
    assert ended.status == 0, ended.said
    assert ended.fired == {f"{fault} 3"}
    assert "cannot be reached any more" in ended.said
    assert ended.results == [(0, 2, STEPS)] * 2, ended.said


@pytest.mark.soak
def test_new_processes_on_the_host_that_is_left(two_hosts: Hosts, tmp_path: Path) -> None:
    """Their state comes from its memory."""
    slots, program = tmp_path / "slots", tmp_path / "hosts.sh"
    slots.write_text(places(two_hosts).replace(",", "\n") + "\n")
    program.write_text(f"#!/bin/sh\ncat {slots}\n")
    program.chmod(0o755)
    flags = ["--host-discovery-script", str(program), "--min-np", "3", "--max-np", "4"]
    ended = run_on(two_hosts, tmp_path, "down", *flags, slots=str(slots))
    assert ended.status == 0, ended.said
    assert ended.fired == {"down 3"}
    assert "these processes end: 2 ranks left, and --min-np is 3" in ended.said
    assert ended.results == [(1, 4, STEPS)] * 4, ended.said


@pytest.mark.soak
def test_a_daemon_of_mpirun_that_is_killed(two_hosts: Hosts, tmp_path: Path) -> None:
    ended = run_on(two_hosts, tmp_path, "daemon", "--hosts", places(two_hosts), "--min-np", "2")
    assert ended.status == 0, ended.said
    assert ended.fired == {"daemon 3"}
    assert "these processes end: mpirun's processes on" in ended.said
    assert ended.results == [(1, 4, STEPS)] * 4, ended.said
