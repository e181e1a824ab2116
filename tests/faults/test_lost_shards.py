"""Elastic jobs with sharded optimizers: ranks that die take no state with them."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import horovodish.torch as hvd
from horovodish.elastic import parts
from horovodish.elastic.memory import Memory
from horovodish.torch.elastic import TorchState
from horovodish.torch.shards import states
from support.elastic import COPIES_VARIABLE, Ended, Scene, run_elastic
from support.hosts import hosts

STEPS = 14
FIRST_COMMIT = 4

Faults = list[tuple[str, int, int]]
"""What happens to which process from which step on; of "any moment" the third is a seed."""


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 7))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The same on every rank, so that the result does not depend on how many there are."""
    loss: Tensor = model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean()
    return loss


def train_with_shards(scene: Scene, options: dict[str, Any], faults: Faults, left: int) -> dict[str, Any]:
    """Trains until this many of the first processes are left."""
    hvd.init()
    model, plain = made()
    optimizer: Any = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
    for fault, victim, seed in faults:
        if fault == "any moment" and scene.me == victim and scene.start == 0:
            threading.Timer(random.Random(seed).uniform(0.0, 0.4), scene.die, [fault]).start()

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        scene.await_recovery()
        while state.step < STEPS or (scene.start == 0 and hvd.size() > left):
            for fault, victim, step in faults:
                if fault != "any moment" and step == state.step and scene.first_time(f"{fault} {victim}"):
                    if scene.me == victim:
                        bring_on(scene, fault)
                    elif fault == "idle":
                        scene.await_end_of(victim)
            optimizer.zero_grad()
            loss_of(model, state.step).backward()
            optimizer.step()
            state.step += 1
            state.commit()

    state = TorchState(model, optimizer, step=0)
    state.register_reset_callbacks([scene.has_reset])
    train(state)
    full = hvd.broadcast_object(optimizer.full_state_dict())
    return {
        "steps": state.step,
        "model": model.state_dict(),
        "optimizer": full,
        "size": hvd.size(),
        "start": scene.start,
    }


def bring_on(scene: Scene, fault: str) -> None:
    """Has this process die now, or in a function that it calls next."""
    match fault:
        case "idle":
            scene.die(fault)
        case "gathering":
            scene.dies_in(fault, states, "_flat_on_host")
        case "writing":
            scene.dies_in(fault, Memory, "seal")
        case "agreeing":
            scene.dies_in(fault, parts, "allgather_object")
        case "loading":
            scene.dies_in(fault, TorchState, "_give_back")


def check(results: list[dict[str, Any]], size: int) -> None:
    """All ranks that are left have the same bits, and within rounding the values of one process."""
    model, optimizer = made()
    for step in range(results[0]["steps"]):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    for result in results:
        assert result["size"] == size and result["steps"] == results[0]["steps"] >= STEPS
        for name, value in result["model"].items():
            torch.testing.assert_close(value, model.state_dict()[name])
            assert torch.equal(value, results[0]["model"][name])
        expected = optimizer.state_dict()["state"]
        assert result["optimizer"]["state"].keys() == expected.keys()
        for index, its in expected.items():
            for key, value in its.items():
                torch.testing.assert_close(result["optimizer"]["state"][index][key], value)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("options", "faults"),
    [
        pytest.param(
            {"shard": "states"}, [("idle", 0, 2), ("gathering", 2, 6), ("agreeing", 1, 9)], id="one after the other"
        ),
        pytest.param(
            {"shard": "gradients"}, [("writing", 0, 5), ("loading", 3, 0)], id="in a copy, and in the recovery"
        ),
    ],
)
def test_the_ranks_that_are_left_share_anew(options: dict[str, Any], faults: Faults, tmp_path: Path) -> None:
    left = 4 - len(faults)
    ended = run_elastic(train_with_shards, tmp_path, 4, options, faults, left, flags=["--min-np", "1"])
    assert ended.status == 0, ended.said
    assert len(ended.fired) == len(faults), ended.said
    assert len(ended.results) == left, ended.said
    check(ended.results, left)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ranks_that_die_at_any_moment(seed: int, tmp_path: Path) -> None:
    """The others go on, or new processes if there is no other way."""
    options = {"shard": "states", "shard_by": "parameter"}
    faults = [("any moment", 1, seed), ("any moment", 2, seed + 10)]
    ended = run_elastic(train_with_shards, tmp_path, 4, options, faults, 2, flags=["--min-np", "1"])
    check_two_or_four(ended)


@pytest.mark.soak
@pytest.mark.parametrize("options", [{"shard": "states"}, {"shard": "gradients", "shard_by": "parameter"}])
@pytest.mark.parametrize("victims", [[0, 3], [2, 3]], ids=["one on each", "all of one"])
@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_of_two_hosts_die_at_any_moment(
    options: dict[str, Any], victims: list[int], seed: int, tmp_path: Path
) -> None:
    faults = [("any moment", victim, seed + victim) for victim in victims]
    with hosts(2) as made:
        places = ",".join(f"{made.address(host)}:2" for host in range(2))
        flags = ["--hosts", places, "--min-np", "1", "--launch-agent", str(made.agent)]
        ended = run_elastic(train_with_shards, tmp_path, None, options, faults, 2, flags=flags, inside=made.inside(0))
    check_two_or_four(ended)


def check_two_or_four(ended: Ended) -> None:
    """Two ranks went on, or four new ones."""
    assert ended.status == 0, ended.said
    last = max(result["start"] for result in ended.results)
    results = [result for result in ended.results if result["start"] == last]
    assert len(results) == (4 if last else 2), ended.said
    check(results, len(results))


@pytest.mark.soak
def test_new_processes_load_what_was_shared(tmp_path: Path) -> None:
    env = {COPIES_VARIABLE: ""}
    options, faults = {"shard": "states"}, [("idle", 1, 7)]
    ended = run_elastic(train_with_shards, tmp_path, 2, options, faults, 2, flags=["--min-np", "2"], env=env)
    assert ended.status == 0, ended.said
    results = [result for result in ended.results if result["start"] == 1]
    assert len(results) == 2, ended.said
    check(results, 2)


def train_in_sets(scene: Scene, lost_in_step: int) -> dict[str, Any]:
    """Four ranks share the state in pairs. Process 3 dies; its pair and the other one make their optimizers anew."""
    hvd.init()
    model, _ = made()

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        pairs = [hvd.add_process_set(pair) for pair in ([0, 1], [2, 3])] if hvd.size() == 4 else []
        shard_set = pairs[hvd.rank() // 2] if pairs else hvd.global_process_set
        plain = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer: Any = hvd.DistributedOptimizer(plain, shard="gradients", shard_set=shard_set)
        if state.full:
            optimizer.load_state_dict(state.full)
        while state.step < STEPS:
            if scene.me == 3 and state.step == lost_in_step:
                scene.die("idle")
            optimizer.zero_grad()
            loss_of(model, state.step).backward()
            optimizer.step()
            state.step += 1
            if state.step >= FIRST_COMMIT:
                state.full = hvd.broadcast_object(optimizer.full_state_dict())
                state.commit()

    state = TorchState(model, full=None, step=0)
    train(state)
    return {
        "steps": state.step,
        "model": model.state_dict(),
        "optimizer": state.full,
        "size": hvd.size(),
        "start": scene.start,
    }


@pytest.mark.soak
@pytest.mark.parametrize("lost_in_step", [FIRST_COMMIT - 2, FIRST_COMMIT + 3])
def test_a_rank_of_another_set_of_shards_is_lost(lost_in_step: int, tmp_path: Path) -> None:
    """Before the first commit and after it. The state is an attribute, because a set ends with one of its ranks."""
    ended = run_elastic(train_in_sets, tmp_path, 4, lost_in_step, flags=["--min-np", "3"])
    assert ended.status == 0, ended.said
    assert ended.fired == {"idle 3"}, ended.said
    assert [result["start"] for result in ended.results] == [0] * 3, ended.said
    check(ended.results, 3)
