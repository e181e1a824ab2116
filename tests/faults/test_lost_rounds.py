"""Elastic jobs whose ranks take steps of their own: a loss within a round goes back to a meeting."""

from __future__ import annotations

import functools
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import horovodish.torch as hvd
from horovodish.torch.elastic import TorchState
from support.elastic import Scene, run_elastic
from support.rounds import Played, digits_model

EVERY = 3
STEPS = 5 * EVERY
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

Faults = list[tuple[str, int, int]]
"""What happens to which process at which step."""


def gradients(model: torch.nn.Module, step: int) -> None:
    """The same on every rank, so that the result does not depend on how many there are."""
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def train_in_rounds(scene: Scene, policy: str, faults: Faults, left: int) -> dict[str, Any]:
    """Trains until this many of the first processes are left."""
    hvd.init()
    model = digits_model()
    sync: hvd.Sync = hvd.LocalSGD(EVERY, after=2) if policy == "LocalSGD" else hvd.DiLoCo(EVERY)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(plain, model.named_parameters(), sync=sync)
    resumed: list[int] = []
    for fault, victim, seed in faults:
        if fault == "any moment" and scene.me == victim and scene.start == 0:
            threading.Timer(random.Random(seed).uniform(0.0, 0.4), scene.die, [fault]).start()

    @hvd.elastic.run
    def train(state: TorchState) -> None:
        scene.await_recovery()
        resumed.append(state.step)
        while state.step < STEPS or (scene.start == 0 and hvd.size() > left):
            for fault, victim, step in faults:
                if fault == "idle" and step == state.step and scene.first_time(f"{fault} {victim}"):
                    if scene.me == victim:
                        scene.die(fault)
                    scene.await_end_of(victim)
            optimizer.zero_grad()
            gradients(model, state.step)
            optimizer.step()
            state.step += 1
            state.commit()

    state = TorchState(model, optimizer, step=0)
    state.register_reset_callbacks([scene.has_reset])
    train(state)
    optimizer.end_round()
    return {"steps": state.step, "model": model.state_dict(), "resumed": resumed, "start": scene.start}


def check(results: list[dict[str, Any]], policy: str) -> None:
    """All ranks that are left have the same bits, and within rounding the values of one process."""
    steps = results[0]["steps"]
    model = digits_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    played = Played([model], [optimizer], EVERY, after=2 if policy == "LocalSGD" else 0)
    if policy == "DiLoCo":
        played = Played([model], [optimizer], EVERY, outer=OUTER)
    for step in range(steps):
        played.step(lambda one, _, step=step: gradients(one, step))  # type: ignore[misc]
    for result in results:
        assert result["steps"] == steps >= STEPS
        for name, value in result["model"].items():
            assert torch.equal(value, results[0]["model"][name])
            if (steps - played.after) % EVERY == 0:
                torch.testing.assert_close(value, model.state_dict()[name])


@pytest.mark.parametrize("policy", ["LocalSGD", "DiLoCo"])
def test_survivors_go_back_to_a_meeting(policy: str, tmp_path: Path) -> None:
    faults = [("idle", 0, 4), ("idle", 2, 10)]
    ended = run_elastic(train_in_rounds, tmp_path, 3, policy, faults, 1, flags=["--min-np", "1"])
    assert ended.status == 0, ended.said
    (result,) = ended.results
    assert result["resumed"] == ([0, 2, 8] if policy == "LocalSGD" else [0, 3, 9]), ended.said
    check(ended.results, policy)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("policy", ["LocalSGD", "DiLoCo"])
def test_ranks_that_die_at_any_moment(policy: str, seed: int, tmp_path: Path) -> None:
    """The others go on, or new processes if there is no other way."""
    faults = [("any moment", 1, seed), ("any moment", 2, seed + 10)]
    ended = run_elastic(train_in_rounds, tmp_path, 4, policy, faults, 2, flags=["--min-np", "1"])
    assert ended.status == 0, ended.said
    last = max(result["start"] for result in ended.results)
    results = [result for result in ended.results if result["start"] == last]
    assert len(results) == (4 if last else 2), ended.said
    check(results, policy)
