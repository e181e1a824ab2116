"""A model in several states of an elastic job: pretraining and fine-tuning, or training and evaluation in turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horovodish as hvd
from horovodish.elastic import ObjectState
from horovodish.elastic.loop import _Loop
from support.elastic import COPIES_VARIABLE, Scene, Weight, run_elastic

STEPS = 4


def fine_tune(scene: Scene) -> list[float]:
    """The second state has the model of the first one. Process 2 dies when the second one has commits of its own."""
    import torch

    import horovodish.torch as hvd

    hvd.init()
    model = torch.nn.Linear(100, 100, bias=False)  # large enough to be held at a commit
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            if scene.me == 2 and state is states[1] and state.step == 2:
                scene.die("tunes")
            optimizer.zero_grad()
            (-model.weight).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    states = [hvd.elastic.TorchState(model, optimizer, step=0) for _ in range(2)]
    for state in states:
        train(state)
    return model.weight.unique().tolist()


@pytest.mark.parametrize("copies", ["always", "never", ""])
def test_a_model_that_another_state_has_too_goes_back_to_what_it_was(copies: str, tmp_path: Path) -> None:
    ended = run_elastic(
        fine_tune, tmp_path, 3, flags=["--min-np", "2", "--reset-limit", "0"], env={COPIES_VARIABLE: copies}
    )
    assert ended.status == 0, ended.said
    assert ended.fired == {"tunes 2"}
    assert ended.results == [[2.0 * STEPS]] * 2
    assert "in the same processes, from commit " in ended.said


def take_turns(scene: Scene, victim_state: int) -> list[int]:
    """Three states have a model in common. Process 2 dies in the second round. New processes go through all rounds.

    The others could make further commits while process 0 goes back to one.
    """
    weight = Weight()
    keep_newer = _Loop._keep_newer

    def keep_slowly(*arguments: Any) -> None:
        time.sleep(0.5 * (scene.me == 0))
        keep_newer(*arguments)

    _Loop._keep_newer = keep_slowly  # type: ignore[method-assign]
    states = [ObjectState(model=weight, round=0) for _ in range(3)]

    def train(state: ObjectState, until: int) -> None:
        while True:
            with hvd.elastic.attempt(state):
                if state.round >= until:
                    break
                for step in range(STEPS):
                    is_there = state is states[victim_state] and state.round == 1 and step == 2
                    if is_there and scene.me == 2 and scene.first_time("takes turns"):
                        scene.die("takes turns")
                    weight.value += int(hvd.allreduce(np.ones(1), name="gradient").item())
                state.round += 1

    for number in range(1, 4):
        for state in states:
            train(state, number)
    return [weight.value, *(state.round for state in states)]


@pytest.mark.parametrize("victim_state", [0, 1, 2])
@pytest.mark.parametrize("copies", ["always", ""])
def test_new_processes_have_the_newest_model_of_states_that_take_turns(
    victim_state: int, copies: str, tmp_path: Path
) -> None:
    ended = run_elastic(take_turns, tmp_path, 3, victim_state, flags=["--min-np", "3"], env={COPIES_VARIABLE: copies})
    assert ended.status == 0, ended.said
    assert ended.fired == {"takes turns 2"}
    assert "in new processes, from commit " in ended.said
    assert ended.results == [[3 * 3 * STEPS, 3, 3, 3]] * 3
