"""Elastic jobs that lose ranks while these start, and starts that fail beside ranks that train."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.elastic import ObjectState, membership
from horovodish.mpi import late_ranks
from horovodish.runtime import starting
from support.elastic import Scene, run_elastic, skip_without_survivors
from support.processes import wait_until

STEPS = 12


def train(state: ObjectState, before_step: Callable[[int], None] = lambda step: None) -> list[int]:
    """Every step, however often it is tried, is one in the history."""

    @hvd.elastic.run
    def steps(state: ObjectState) -> None:
        while state.step < STEPS:
            before_step(state.step)
            hvd.allreduce(np.ones(3), name="gradient")
            state.history.append(state.step)
            state.step += 1
            state.commit()

    steps(state)
    assert state.history == list(range(STEPS))
    return [hvd.size(), int(os.environ["HOROVODISH_START"])]


def leave(scene: Scene, fault: str) -> None:
    """Be killed or be stopped."""
    scene.fired(fault)
    os.kill(os.getpid(), signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    os._exit(99)  # it must not come to this


def leave_in(scene: Scene, fault: str, module: Any, function: str) -> None:
    setattr(module, function, lambda *_, **__: leave(scene, fault))


def lose_one_in_init(scene: Scene, fault: str, start: int) -> list[int]:
    """Process 1 is lost when the others wait for it in init(), in the first processes or in the second ones."""
    if scene.me == 1 and scene.start == start:
        leave_in(scene, fault, late_ranks, "roll_call")

    def die(step: int) -> None:
        if start > 0 and scene.me == 0 and step == 5 and scene.first_time("dies"):
            scene.die("dies")

    return train(ObjectState(step=0, history=[]), die)


@pytest.mark.parametrize(
    ("start", "fault"),
    [
        (0, "killed"),
        (1, "stopped"),
        pytest.param(0, "stopped", marks=pytest.mark.soak),
        pytest.param(1, "killed", marks=pytest.mark.soak),
    ],
)
def test_a_rank_is_lost_in_init(start: int, fault: str, tmp_path: Path) -> None:
    flags = ["--min-np", "2", "--host-timeout", "2"]
    ended = run_elastic(lose_one_in_init, tmp_path, 2, fault, start, flags=flags)
    assert ended.status == 0, ended.said
    assert f"{fault} 1" in ended.fired
    assert ended.results == [[2, start + 1]] * 2, ended.said
    assert "these processes end: a rank was lost while the others were in init()" in ended.said
    assert "firewall" not in ended.said


def lose_one_when_init_has_returned(scene: Scene) -> list[int]:
    """Process 2 is still in init() when process 1 dies, whose init() has returned."""
    if scene.me == 2 and scene.start == 0:
        start_together = starting._start_together

        def stay(*args: Any) -> Any:
            start_together(*args)
            threading.Event().wait()

        starting._start_together = stay
    hvd.init()
    if scene.me == 1 and scene.start == 0:
        scene.die("dies")
    return train(ObjectState(step=0, history=[]))


def test_a_rank_is_lost_when_init_has_not_returned_on_all(tmp_path: Path) -> None:
    ended = run_elastic(lose_one_when_init_has_returned, tmp_path, 3, flags=["--min-np", "2"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert ended.results == [[3, 1]] * 3, ended.said


def lose_a_new_process(scene: Scene, slots: str, kill: str, who_leaves: str) -> dict[str, Any]:
    """A new process dies when those that train have been told to make room. Some may have left their world by then."""
    if scene.start == 1 and scene.me == 2:
        threading.Thread(target=lambda: (wait_until(Path(kill).exists), scene.die("new")), daemon=True).start()
    was_called = was_called_off = False

    def watch(step: int) -> None:
        nonlocal was_called, was_called_off
        if step != 4 or scene.start > 0 or was_called:
            return
        if hvd.rank() == 0:
            Path(slots).write_text("localhost:3\n")
        wait_until(membership.hosts_updated)
        was_called = True
        if who_leaves == "rank 0" and hvd.rank() == 0:
            state.commit()
            raise AssertionError("it has left the world")
        Path(kill).touch()
        scene.await_word("these new processes could not come up; the job continues without them")
        if not who_leaves:
            wait_until(lambda: not membership.hosts_updated())
        was_called_off = True

    state = ObjectState(step=0, history=[])
    return {"ranks": train(state, watch), "called": was_called, "called off": was_called_off}


@pytest.mark.parametrize("who_leaves", ["", "rank 0"])
def test_a_start_that_fails_leaves_the_job_as_it_was(who_leaves: str, tmp_path: Path) -> None:
    """The limit allows one start, and is no reason to end ranks that train."""
    slots = tmp_path / "slots"
    slots.write_text("localhost:2\n")
    flags = ["--min-np", "1", "--hostfile", str(slots), "--reset-limit", "1"]
    ended = run_elastic(lose_a_new_process, tmp_path, None, str(slots), str(tmp_path / "kill"), who_leaves, flags=flags)
    assert ended.status == 0, ended.said
    assert ended.fired == {"new 2"}
    assert [result["ranks"] for result in ended.results] == [[2, 0]] * 2, ended.said
    assert all(result["called"] for result in ended.results)
    assert "these processes end" not in ended.said
    assert ended.said.count("in the same processes") == (2 if who_leaves else 0), "once more in the sum"


def lose_a_rank_while_a_start_ends(scene: Scene, folder: str) -> list[int]:
    """New processes never come to init() and do not end when they are told to. Meanwhile one that trains dies.

    SIGTERM must find their handler, so they have 30 s: a busy machine starts Python slowly.
    """
    if scene.start == 1:
        signal.signal(signal.SIGTERM, lambda *_: scene.note("told", ""))
        threading.Event().wait()

    def watch(step: int) -> None:
        if step == 4 and scene.me == 0 and scene.first_time("grows"):
            Path(folder, "slots").write_text("localhost:3\n")
        if step == 4 and scene.me == 1:
            wait_until(Path(folder, "told").exists)
            scene.die("old")
        if step == 8:
            scene.await_word("did not come to init() within 30 s; the job continues without them")

    return train(ObjectState(step=0, history=[]), watch)


@pytest.mark.soak
def test_ranks_that_train_are_looked_after_while_a_start_ends(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.write_text("localhost:2\n")
    flags = ["--min-np", "1", "--hostfile", str(slots), "--elastic-timeout", "30"]
    ended = run_elastic(lose_a_rank_while_a_start_ends, tmp_path, None, str(tmp_path), flags=flags)
    assert ended.status == 0, ended.said
    assert ended.fired == {"old 1"}
    assert ended.results == [[1, 0]], ended.said
    assert ended.said.count("0 of 3 new processes are ready") == 1, ended.said
    assert "of 2 new processes" not in ended.said, "the first ones are not new"
    assert ended.said.index("continuing with 1 rank") < ended.said.index("did not come to init()"), ended.said


def end_without_a_state(scene: Scene) -> None:
    """The others wait for process 1 in MPI_Finalize."""
    hvd.init()
    hvd.allreduce(np.ones(3), name="gradient")
    if scene.me == 1:
        for other in (0, 2):
            wait_until(lambda other=other: "exit" in phases_of(other))
        scene.die("end")


def phases_of(rank: int) -> str:
    return Path(os.environ["HOROVODISH_RUN_DIR"], f"rank-{rank}.phases").read_text()


@pytest.mark.soak
def test_a_rank_is_lost_when_the_others_end(tmp_path: Path) -> None:
    ended = run_elastic(end_without_a_state, tmp_path, 3, flags=["--min-np", "2"])
    assert ended.status == 128 + signal.SIGKILL, ended.said
    assert ended.fired == {"end 1"}


def lose_a_folder(scene: Scene, folder: str) -> list[int]:
    """Process 1 dies when there is a file where its output was kept."""

    def die(step: int) -> None:
        if scene.me == 1 and step == 5 and scene.first_time("dies"):
            Path(folder).rename(f"{folder}.away")
            Path(folder).touch()
            scene.die("dies")

    return train(ObjectState(step=0, history=[]), die)


@pytest.mark.parametrize("comes_back", [True, False])
def test_new_processes_that_cannot_be_started(comes_back: bool, tmp_path: Path) -> None:
    """The job tries again, in words, until the time is over."""
    kept, said = tmp_path / "kept" / "rank.1", tmp_path / "said"

    def bring_back() -> None:
        wait_until(lambda: said.exists() and said.read_text().count("the job tries again in") >= 2)
        kept.unlink()

    skip_without_survivors()
    bringing = threading.Thread(target=bring_back)
    if comes_back:
        bringing.start()
    flags = ["--min-np", "2", "--output-filename", str(kept.parent)]
    flags += [] if comes_back else ["--elastic-timeout", "2"]
    ended = run_elastic(lose_a_folder, tmp_path, 2, str(kept), flags=flags)
    if comes_back:
        bringing.join()
    assert ended.fired == {"dies 1"}
    assert f"new processes cannot be started: --output-filename: {kept}/stdout cannot be written: " in ended.said
    assert "the job tries again in 1 s; the job ends after" in ended.said
    assert "Traceback" not in ended.said
    if comes_back:
        assert ended.results == [[2, 1]] * 2, ended.said
        assert ended.status == 0, ended.said
    else:
        assert "new processes could not be started for 2 s; --elastic-timeout waits longer" in ended.said
        assert ended.status == 128 + signal.SIGKILL, ended.said


def name_the_slots(scene: Scene) -> list[int]:
    return train(ObjectState(step=0, history=[]))


@pytest.mark.parametrize(
    "hosts",
    ["--hosts", pytest.param("--hostfile", marks=pytest.mark.soak), "--host-discovery-script", "Slurm"],
)
def test_a_job_begins_with_the_slots_that_there_are(hosts: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("#!/bin/sh\necho localhost:2\n" if hosts == "--host-discovery-script" else "localhost:2\n")
    file.chmod(0o755)
    flags = [] if hosts == "Slurm" else [hosts, "localhost:2" if hosts == "--hosts" else str(file)]
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"} if hosts == "Slurm" else {}
    ended = run_elastic(name_the_slots, tmp_path, 3, flags=[*flags, "--min-np", "1"], env=slurm)
    assert ended.status == 0, ended.said
    assert ended.results == [[2, 0]] * 2, ended.said


def leave_before_training(scene: Scene, folder: str) -> list[int]:
    """New processes with one rank more take over. Before they have the state, that rank has to leave again."""
    slots = Path(folder, "slots")
    if scene.start == 1:
        hvd.init()
        membership.follow()
        if scene.me == 0:
            slots.write_text("localhost:2\n")
        wait_until(membership.hosts_updated)

    def grow(step: int) -> None:
        if scene.start == 0 and step == 5:
            slots.write_text("localhost:3\n")
            wait_until(membership.hosts_updated)

    return train(ObjectState(step=0, history=[]), grow)


@pytest.mark.soak
def test_ranks_that_have_no_state_yet_are_not_said_to_train(tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.write_text("localhost:2\n")
    flags = ["--min-np", "2", "--hostfile", str(slots)]
    ended = run_elastic(leave_before_training, tmp_path, None, str(tmp_path), flags=flags)
    assert ended.status == 0, ended.said
    assert ended.results == [[2, 1]] * 2, ended.said
    assert "in the same processes, from commit 6" in ended.said, ended.said
    assert "from the beginning" not in ended.said
