"""Elastic jobs that lose a rank between `init()` and training: the others, or new processes, begin to train."""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.elastic import Ended, Scene, run_elastic

STEPS = 4
LENGTH = 5

Step = Callable[[Any, int], object]
"""Takes a state and its number, which is the gradient of the step."""


def with_torch(hvd: Any, **options: Any) -> tuple[Any, Step]:
    """An optimizer that has made a step before, so that its state matters."""
    import torch

    weights = torch.nn.Parameter(torch.zeros(LENGTH))
    plain = torch.optim.SGD([weights], 0.5, 0.5)
    weights.grad = torch.zeros(LENGTH)
    plain.step()
    before = plain.state_dict()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], 0.5, 0.5), [("weights", weights)], **options)
    optimizer.load_state_dict(before)

    def step(state: Any, number: int) -> None:
        optimizer.zero_grad()
        (weights * number).sum().backward()
        optimizer.step()

    return hvd.elastic.TorchState(optimizer=optimizer, weights=weights, step=0), step


def with_jax(hvd: Any, **options: Any) -> tuple[Any, Step]:
    import optax
    from jax import numpy as jnp

    tx = hvd.DistributedOptimizer(optax.sgd(0.5, 0.5), **options)

    def step(state: Any, number: int) -> None:
        updates, state.moments = tx.update(jnp.full(LENGTH, float(number)), state.moments, state.weights)
        state.weights = optax.apply_updates(state.weights, updates)

    weights = jnp.zeros(LENGTH)
    return hvd.elastic.JaxState(weights=weights, moments=tx.init(weights), step=0), step


def with_keras(hvd: Any) -> tuple[Any, Step]:
    import keras

    model = keras.Sequential(
        [keras.Input((LENGTH,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, 0.5))
    model.compile(optimizer, loss=lambda target, output: output)

    def step(state: Any, number: int) -> None:
        model.train_on_batch(np.full((1, LENGTH), float(number)), np.zeros(1))

    return hvd.elastic.KerasState(model, step=0), step


def with_tensorflow(hvd: Any) -> tuple[Any, Step]:
    import tensorflow as tf

    weights, velocity = tf.Variable(tf.zeros(LENGTH)), tf.Variable(tf.zeros(LENGTH))

    def step(state: Any, number: int) -> None:
        velocity.assign(0.5 * velocity + hvd.allreduce(tf.fill([LENGTH], float(number)), name="gradient"))
        weights.assign_sub(0.5 * velocity)

    return hvd.elastic.TensorFlowState([weights, velocity], weights=weights, step=0), step


MADE: dict[str, tuple[str, Callable[..., tuple[Any, Step]], dict[str, Any]]] = {
    "torch": ("torch", with_torch, {}),
    "torch with shards": ("torch", with_torch, {"shard": "states"}),
    "torch with whole parameters": ("torch", with_torch, {"shard": "states", "shard_by": "parameter"}),
    "jax": ("jax", with_jax, {}),
    "jax with shards": ("jax", with_jax, {"shard": "states"}),
    "keras": ("keras", with_keras, {}),
    "tensorflow": ("tensorflow", with_tensorflow, {}),
}


def train(scene: Scene, what: str, place: str, seed: int) -> dict[str, Any]:
    """Process 1 dies in the place, when `init()` has returned and before the first step."""
    framework, make, options = MADE[what]
    hvd = importlib.import_module(f"horovodish.{framework}")
    hvd.init()
    dies = scene.me == 1 and scene.start == 0
    if dies and place == "any moment":
        threading.Timer(random.Random(seed).uniform(0.0, 0.5), scene.die, [place]).start()
    state, step = make(hvd, **options)
    if dies and place == "before a collective":
        scene.die(place)
    for _ in range(20 if place == "any moment" else 1):
        hvd.broadcast_object(scene.me)
        time.sleep(0.01)
    if dies and place == "before training":
        scene.die(place)

    @hvd.elastic.run
    def steps(state: Any) -> None:
        while state.step < STEPS or (place == "any moment" and scene.start == 0 and hvd.size() == 3):
            step(state, state.step % STEPS)
            state.step += 1
            state.commit()

    steps(state)
    weights = state.model.get_weights()[0].reshape(-1) if what == "keras" else state.weights
    numbers = np.asarray(weights.detach() if framework == "torch" else weights).tolist()
    return {"weights": numbers, "steps": state.step, "size": hvd.size(), "start": scene.start}


def check(ended: Ended, place: str) -> int:
    """Check that the ranks that came to their ends have the bits of one process. Return how many they are."""
    assert ended.status == 0, ended.said
    assert ended.fired == {f"{place} 1"}, ended.said
    last = max(result["start"] for result in ended.results)
    results = [result for result in ended.results if result["start"] == last]
    weights = velocity = 0.0
    for number in range(results[0]["steps"]):
        velocity = 0.5 * velocity + number % STEPS
        weights -= 0.5 * velocity
    for result in results:
        assert result == results[0]
        assert result["weights"] == [weights] * LENGTH
        assert result["size"] == len(results)
    return len(results)


@pytest.mark.parametrize(
    "what",
    [pytest.param(name, marks=() if name in ("torch", "jax with shards") else pytest.mark.soak) for name in MADE],
)
def test_a_loss_that_a_collective_before_training_reports(what: str, tmp_path: Path) -> None:
    """These ranks cannot go back to before it, so new processes begin."""
    ended = run_elastic(train, tmp_path, 3, what, "before a collective", 0, flags=["--min-np", "1"])
    assert check(ended, "before a collective") == 3
    assert "these processes end: a rank was lost before training had begun" in ended.said


@pytest.mark.soak
@pytest.mark.parametrize(
    "what",
    [pytest.param(name, marks=() if name == "jax with shards" else pytest.mark.soak) for name in MADE],
)
def test_a_loss_that_is_seen_when_training_begins(what: str, tmp_path: Path) -> None:
    """New processes begin if a part of an optimizer's state is gone. Otherwise the ranks that are left go on."""
    ended = run_elastic(train, tmp_path, 3, what, "before training", 0, flags=["--min-np", "1"])
    left = check(ended, "before training")
    if " with " in what:
        assert left == 3
        assert "not all ranks can repeat what has to be repeated" in ended.said
    else:
        assert left == 2
        assert "in the same processes" in ended.said


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("what", MADE)
def test_a_loss_at_any_moment_before_training(what: str, seed: int, tmp_path: Path) -> None:
    ended = run_elastic(train, tmp_path, 3, what, "any moment", seed, flags=["--min-np", "1"])
    check(ended, "any moment")
