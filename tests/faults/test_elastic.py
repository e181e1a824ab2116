"""Elastic jobs whose ranks die at the worst moments: no step is lost, and those that are left agree bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.transfers import receive
from horovodish.elastic import ObjectState, exchange, membership
from horovodish.elastic.copies import Copies
from horovodish.elastic.memory import Memory
from horovodish.mpi import communicators
from horovodish.runtime import basics
from support.elastic import COPIES_VARIABLE, Ended, Scene, run_elastic
from support.midway import LargeReduction
from support.processes import wait_until

STEPS = 16
LENGTH = 1003

Faults = list[tuple[str, int, int]]
"""What happens to which process at which step."""


def train_with_faults(scene: Scene, faults: Faults) -> dict[str, Any]:
    """Adds numbers up that do not depend on the ranks; the sums are exact."""
    for fault, victim, _ in faults:
        if scene.me == victim and scene.start == 0:
            prepare(scene, fault)
    tries = 0

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        nonlocal tries
        scene.await_recovery()
        while state.step < STEPS:
            tries += 1
            for fault, victim, step in faults:
                if step == state.step and scene.first_time(f"{fault} {victim}"):
                    commit_fault(scene, state, fault, victim)
            gradient = np.arange(LENGTH) + state.step
            state.sum += hvd.allreduce(gradient.astype(float), name="gradient")
            state.history.append(state.step)
            state.step += 1
            state.commit()

    state = ObjectState(step=0, history=[], sum=np.zeros(LENGTH), of=scene.me)
    state.register_reset_callbacks([scene.has_reset])
    train(state)
    return {"sum": state.sum, "history": state.history, "of": state.of, "tries": tries, "start": scene.start}


def prepare(scene: Scene, fault: str) -> None:
    """Has a process die in a function of its own that comes later."""
    match fault:
        case "sending" | "receiving":
            scene.dies_in(fault, exchange, "broadcast")
        case "loading":
            scene.dies_in(fault, ObjectState, "_load")
        case "telling":
            scene.dies_in(fault, exchange, "allgather_object")
        case "leaving":
            scene.dies_in(fault, basics, "shutdown")
        case "regrouping":
            scene.dies_in(fault, membership, "regroup")
        case "forming":
            scene.dies_in(fault, communicators, "of", after=1)


def commit_fault(scene: Scene, state: ObjectState, fault: str, victim: int) -> None:
    is_victim = scene.me == victim
    match fault:
        case "idle":
            if is_victim:
                scene.die(fault)
            scene.await_end_of(victim)
        case "waited for":
            if is_victim:
                scene.die(fault)
        case "commit":  # in the middle of a copy
            if is_victim:
                scene.dies_in(fault, Memory, "seal")
            else:
                scene.before_next(Copies, "write", lambda: scene.await_end_of(victim))
        case "awaited":  # by receives alone
            hvd.barrier()  # which nobody repeats after the loss
            if is_victim:
                scene.die(fault)
            receive(ARRAYS, np.empty(1)).wait()
        case "negotiating":  # this rank's part is announced, and some other rank's is not
            if is_victim:
                handle = hvd.allreduce_async(np.ones(3), name="half announced")
                assert not handle.poll()
                scene.die(fault)
            scene.await_end_of(victim)
            hvd.allreduce(np.ones(3), name="half announced")
        case "reducing":
            while True:
                reduction = LargeReduction()
                if is_victim and reduction.catch():
                    scene.die(fault)
                reduction.finish()
        case "joining":
            if is_victim:
                scene.die(fault)
            hvd.join()
        case "joined":
            if is_victim:
                threading.Timer(0.05, scene.die, [fault]).start()
                hvd.join()
            scene.await_end_of(victim)
            hvd.join()
        case "stopped":
            if is_victim:
                scene.fired(fault)
                os.kill(os.getpid(), signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGKILL)  # it must not come to this
        case "wakes":
            assert hvd.size() < 4, "the others have gone on"
            with contextlib.suppress(ProcessLookupError):
                os.kill(scene.pid(victim), signal.SIGCONT)
            scene.await_end_of(victim)
        case "raising":
            if is_victim:
                scene.fired(fault)
                raise ZeroDivisionError("a bug of the user's")
        case "unpicklable":
            if is_victim:
                scene.fired(fault)
                state.lock = threading.Lock()


def check(ended: Ended, faults: Faults, results: int) -> None:
    """The work was done, and this many ranks were there at its end."""
    assert ended.status == 0, ended.said
    assert ended.fired >= {f"{fault} {victim}" for fault, victim, _ in faults if fault != "wakes"}, ended.said
    assert len(ended.results) == results, ended.said
    expected = sum(np.arange(LENGTH) + float(step) for step in range(STEPS))
    for result in ended.results:
        assert result["history"] == list(range(STEPS)), "no step is lost, and none counts twice"
        np.testing.assert_array_equal(result["sum"], expected)
        assert result["of"] == ended.results[0]["of"], "all have the state of one rank"
        assert result["tries"] <= STEPS + len(faults), "a step was repeated more than once for a fault"


SAME_PROCESSES: list[tuple[Faults, str]] = [
    ([("idle", 0, 3), ("waited for", 3, 7), ("negotiating", 1, 11)], "auto"),
    ([("reducing", 0, 3), ("idle", 2, 7), ("reducing", 1, 11)], "auto"),
    ([("reducing", 3, 3), ("negotiating", 0, 7), ("idle", 1, 11)], "mpi_ring"),
    ([("idle", 1, 5), ("idle", 2, 5)], "auto"),
    ([("sending", 0, -1), ("commit", 1, 7)], "auto"),
    ([("loading", 1, -1), ("idle", 2, 5)], "auto"),
    ([("receiving", 2, -1), ("joining", 1, 5), ("joined", 0, 9)], "auto"),
    ([("telling", 3, -1), ("idle", 1, 5), ("leaving", 2, -1)], "auto"),
    ([("idle", 3, 5), ("regrouping", 1, -1)], "auto"),
    ([("stopped", 2, 4), ("wakes", 2, 5)], "auto"),
    ([("awaited", 0, 3), ("awaited", 2, 7)], "auto"),
    ([("awaited", 3, 3)], "mpi_ring"),
]


def cases() -> list[Any]:
    """Each case with commits that are copied and, where no fault is in a copy, with commits that are held."""
    return [
        pytest.param(faults, plane, copies, id=f"{faults}-{plane}-{copies}")
        for faults, plane in SAME_PROCESSES
        for copies in ("always", "never")
        if copies == "always" or "commit" not in {fault for fault, *_ in faults}
    ]


@pytest.mark.parametrize(("faults", "plane", "copies"), cases())
def test_survivors_go_on(faults: Faults, plane: str, copies: str, tmp_path: Path) -> None:
    env = {"HOROVODISH_PLANE": plane, COPIES_VARIABLE: copies}
    ended = run_elastic(train_with_faults, tmp_path, 4, faults, flags=["--min-np", "1"], env=env)
    victims = {victim for _, victim, _ in faults}
    check(ended, faults, 4 - len(victims))
    assert "in the same processes" in ended.said
    assert all(result["start"] == 0 for result in ended.results), ended.said


def train_in_blocks(scene: Scene) -> dict[str, Any]:
    """As `train_with_faults`, without a function: process 0 dies early, process 3 in the last step."""
    state = ObjectState(step=0, history=[], sum=np.zeros(LENGTH))
    state.register_reset_callbacks([scene.has_reset])
    tries = 0
    while True:
        with hvd.elastic.attempt(state):
            scene.await_recovery()
            if state.step == STEPS:
                break
            tries += 1
            for victim, step in ((0, 3), (3, STEPS - 1)):
                if scene.me == victim and state.step == step:
                    scene.die("block")
            gradient = np.arange(LENGTH) + state.step
            state.sum += hvd.allreduce(gradient.astype(float), name="gradient")
            state.history.append(state.step)
            state.step += 1
            state.commit()
    ranks = int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="all have left the loop").item())
    return {"sum": state.sum, "history": state.history, "of": ranks, "tries": tries}


def test_blocks_are_left_and_repeated(tmp_path: Path) -> None:
    ended = run_elastic(train_in_blocks, tmp_path, 4, flags=["--min-np", "1"])
    check(ended, [("block", 0, 3), ("block", 3, STEPS - 1)], 2)
    assert [result["of"] for result in ended.results] == [2, 2]


def lose_a_rank_at(scene: Scene, place: str) -> dict[str, Any]:
    """Process 0 dies when the others have no more collectives in their block, or are between two phases."""
    first, second = ObjectState(step=0, values=[]), ObjectState(step=0, values=[])
    resets: list[int] = []
    second.register_reset_callbacks([lambda: resets.append(hvd.size())])

    def notice(here: str) -> None:
        if here == place and scene.first_time(place):
            if scene.me == 0:
                scene.die(place)
            wait_until(basics.is_cut_off)

    for state in (first, second):
        while True:
            with hvd.elastic.attempt(state):
                if state.step == 4:
                    notice("last block")
                    break
                state.values.append(hvd.allreduce(np.full(1, state.step), name="value").item())
                state.step += 1
                if state.step == 2:
                    notice("block")
        notice("phases")
    return {"values": [first.values, second.values], "resets": resets}


@pytest.mark.parametrize(
    ("place", "copies"), [*itertools.product(("block", "last block", "phases"), ("always", "never", ""))]
)
def test_a_loss_that_no_collective_reports(place: str, copies: str, tmp_path: Path) -> None:
    env = {COPIES_VARIABLE: copies}
    ended = run_elastic(lose_a_rank_at, tmp_path, 3, place, flags=["--min-np", "1"], env=env)
    assert ended.status == 0, ended.said
    assert ended.fired == {f"{place} 0"}
    assert [result["values"] for result in ended.results] == [[[0, 1, 2, 3]] * 2] * 2, ended.said
    for result in ended.results:
        assert result["resets"][0] == 2, "a state that was made before the loss knows of it when its phase begins"


NEW_PROCESSES: list[tuple[int, Faults, str]] = [
    (2, [("idle", 0, 3), ("commit", 2, 7)], "always"),
    (2, [("idle", 0, 3), ("idle", 2, 7)], "never"),
    (1, [("idle", 0, 5), ("forming", 1, -1)], "never"),
]


@pytest.mark.parametrize(("least", "faults", "copies"), NEW_PROCESSES, ids=str)
def test_new_processes_go_on(least: int, faults: Faults, copies: str, tmp_path: Path) -> None:
    """Too few are left, and one of them dies in the middle of a copy; one dies while the others begin again."""
    flags, env = ["--min-np", str(least)], {COPIES_VARIABLE: copies}
    ended = run_elastic(train_with_faults, tmp_path, 3, faults, flags=flags, env=env)
    check(ended, faults, len(ended.results))
    assert len(ended.results) >= least
    assert all(result["start"] == 1 for result in ended.results), ended.said
    assert all(result["tries"] < STEPS for result in ended.results), "they begin where the earlier ones have been"


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("raising", "ZeroDivisionError: a bug of the user's"),
        ("unpicklable", "TypeError: state.lock cannot be kept: cannot pickle '_thread.lock' object"),
    ],
)
def test_what_is_wrong_in_the_script_ends_the_job(fault: str, line: str, tmp_path: Path) -> None:
    env = {COPIES_VARIABLE: "always"}  # a commit that copies nothing does not see what cannot be copied
    ended = run_elastic(train_with_faults, tmp_path, 2, [(fault, 1, 4)], flags=["--min-np", "1"], env=env)
    assert ended.status == 1, ended.said
    assert ended.fired == {f"{fault} 1"}
    assert line in ended.said
    assert ended.said.count("Traceback (most recent call last)") == (1 if fault == "raising" else 2), ended.said
    assert not ended.results


def finish_apart(scene: Scene) -> list[int]:
    """Process 2 has less to do than the others."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while len(state.history) < (4 if scene.me == 2 else STEPS):
            hvd.allreduce(np.ones(3), name="gradient")
            state.history.append(hvd.size())
            state.commit()

    state = ObjectState(history=[])
    train(state)
    return list(state.history)


def test_ranks_that_have_finished(tmp_path: Path) -> None:
    ended = run_elastic(finish_apart, tmp_path, 3, flags=["--min-np", "1"])
    assert ended.status == 0, ended.said
    first, *others = sorted(ended.results, key=len)
    assert first == [3] * 4
    assert others == [[3] * 4 + [2] * (STEPS - 4)] * 2


def train_and_save(scene: Scene, fault: str) -> int:
    """Process 0 dies when all have trained, and the others have finished."""

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        while state.step < 4:
            hvd.allreduce(np.ones(3), name="gradient")
            state.step += 1
            state.commit()

    state = ObjectState(step=0)
    train(state)
    if scene.me == 0:
        for other in (1, 2):
            scene.await_end_of(other)
        if fault == "supervisor":
            scene.fired(fault)
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        scene.die(fault)
    return state.step


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("saving", "was killed by signal 9 (SIGKILL)"),
        ("supervisor", "cannot be reached any more, or somebody killed its"),
    ],
)
def test_a_rank_that_is_lost_while_it_saves_what_was_trained(fault: str, line: str, tmp_path: Path) -> None:
    ended = run_elastic(train_and_save, tmp_path, 3, fault, flags=["--min-np", "1"])
    assert ended.status == 128 + signal.SIGKILL, ended.said
    assert ended.fired == {f"{fault} 0"}
    assert line in ended.said.splitlines()[-2], ended.said
    assert ended.results == [4, 4]


def join_before_a_loss(scene: Scene) -> list[int]:
    """Process 0 has no more to do in the epoch. The others take one more step, after which process 3 dies."""
    pairs: list[hvd.ProcessSet] = []
    hvd.init()

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        if state.epoch == 0:
            if scene.me != 0 and not state.history:
                hvd.allreduce(np.ones(3), name="gradient")
                state.history.append("step")
                state.commit()
            if scene.me == 3:
                scene.die("joined")
            hvd.join()
            state.epoch = 1

    def add_the_last_two() -> None:
        pairs.append(hvd.add_process_set([hvd.size() - 2, hvd.size() - 1]))

    state = ObjectState(epoch=0, history=[])
    state.register_reset_callbacks([add_the_last_two])
    add_the_last_two()
    train(state)
    assert [pair.ranks for pair in pairs] == [[2, 3], [1, 2]]
    if not pairs[-1].included():
        return list(state.history)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=pairs[-1]).tolist() == [2]
    return list(state.history)


def test_a_rank_that_had_joined_takes_the_steps_that_it_has_missed(tmp_path: Path) -> None:
    ended = run_elastic(join_before_a_loss, tmp_path, 4, flags=["--min-np", "1"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"joined 3"}
    assert ended.results == [["step"]] * 3


def train_models(scene: Scene, dies: bool) -> dict[str, Any]:
    """Windows of two backwards, statistics of all ranks, rows of an embedding, and Adasum at every other step."""
    import torch

    import horovodish.torch as hvd_torch

    hvd_torch.init()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(scene.me)
    rows = torch.nn.Embedding(6, 4, sparse=True)
    model = torch.nn.Sequential(
        rows, torch.nn.Linear(4, 8, bias=False), hvd_torch.SyncBatchNorm(8), torch.nn.Linear(8, 2)
    )
    other = torch.nn.Linear(3, 3)
    optimizer = hvd_torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), backward_passes_per_step=2
    )
    adasum = hvd_torch.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), op=hvd.Adasum)
    backwards = 0

    def die_in_a_window(gradient: torch.Tensor) -> None:
        nonlocal backwards
        backwards += 1
        if dies and scene.me == 3 and backwards == 6:
            scene.die("backward")

    model[1].weight.register_hook(die_in_a_window)

    @hvd_torch.elastic.run
    def train(state: hvd_torch.elastic.TorchState) -> None:
        scene.await_recovery()
        while len(state.history) < 10:
            step = len(state.history)
            inputs = torch.Generator().manual_seed(step)
            if step % 2 == 0:
                optimizer.zero_grad()
                for _ in range(2):
                    model(torch.randint(6, (5,), generator=inputs)).square().mean().backward()
                optimizer.step()
            else:
                adasum.zero_grad()
                other(torch.randn(5, 3, generator=inputs)).square().mean().backward()
                if dies and scene.me == 0 and step == 7:
                    scene.die("adasum")
                adasum.step()
            state.history.append(step)
            state.commit()

    state = hvd_torch.elastic.TorchState(model, optimizer, other=other, adasum=adasum, history=[])
    state.register_reset_callbacks([scene.has_reset])
    train(state)
    hvd_torch.check_consistency(model, optimizer)
    parameters = [*model.named_parameters(), *other.named_parameters("other")]
    return {
        "history": state.history,
        "parameters": {name: parameter.detach().numpy() for name, parameter in parameters},
        "buffers": {name: buffer.numpy() for name, buffer in model.named_buffers()},
    }


@pytest.mark.soak
def test_models_are_trained_through_losses(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    jobs = []
    for name, np_, dies in (("undisturbed", 2, False), ("disturbed", 4, True)):
        (tmp_path / name).mkdir()
        jobs.append(run_elastic(train_models, tmp_path / name, np_, dies, flags=["--min-np", "2"]))
        assert jobs[-1].status == 0, jobs[-1].said
    undisturbed, disturbed = jobs
    assert disturbed.fired == {"backward 3", "adasum 0"}
    one, other = disturbed.results
    assert one["history"] == other["history"] == list(range(10))
    for kind in ("parameters", "buffers"):
        for name, value in one[kind].items():
            np.testing.assert_array_equal(other[kind][name], value)
    for name, value in undisturbed.results[0]["parameters"].items():
        np.testing.assert_allclose(one["parameters"][name], value, rtol=1e-6, atol=1e-9)
