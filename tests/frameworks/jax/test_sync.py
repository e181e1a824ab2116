"""`DistributedOptimizer(sync=...)` of optax: ranks that take steps of their own, and meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish
import horovodish.jax as hvd
from support.documents import python_blocks
from support.on_ranks import on_ranks

LR = 0.05
STEPS = 9
SIZES = {"a": (3, 4), "b": (4,), "c": (2, 5)}
FRAGMENT = {"a": 0, "b": 1, "c": 1}


def parameters() -> dict[str, jax.Array]:
    return {name: jnp.linspace(-1, 1, int(np.prod(shape))).reshape(shape) for name, shape in SIZES.items()}


def batch(step: int, rank: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([step, rank])
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SIZES.items()}


def loss(params: Any, target: Any) -> Any:
    return sum(jnp.sum((params[name] - target[name]) ** 2) for name in params)


class Play:
    """All ranks in one process, with plain SGD within and the outer optimizer of DiLoCo between."""

    def __init__(self, every: int, after: int = 0, outer: tuple[float, float] = (1.0, 0.0), fragments: int = 1):
        self.every, self.after, self.fragments = every, after, fragments
        self.lr, self.momentum = outer
        self.common = {name: np.array(value, np.float64) for name, value in parameters().items()}
        self.velocity = {name: value * 0 for name, value in self.common.items()}
        self.ranks = [dict(self.common) for _ in range(hvd.size())]
        self.steps = 0

    def step(self) -> dict[str, np.ndarray]:
        gradients = [
            {name: 2 * (params[name] - target) for name, target in batch(self.steps, rank).items()}
            for rank, params in enumerate(self.ranks)
        ]
        if self.steps < self.after:
            gradients = [{name: np.mean([each[name] for each in gradients], 0) for name in SIZES} for _ in self.ranks]
        for params, its in zip(self.ranks, gradients, strict=True):
            params.update({name: params[name] - LR * its[name] for name in SIZES})
        self.steps += 1
        for name, common in self.common.items():
            if self.steps <= self.after:
                self.common[name] = self.ranks[0][name]
            elif self._is_due(name):
                change = np.mean([params[name] for params in self.ranks], 0) - common
                velocity = self.velocity[name] = self.momentum * self.velocity[name] + change
                self.common[name] = common + self.lr * (change + self.momentum * velocity)
                for params in self.ranks:
                    params[name] = self.common[name]
        return self.ranks[hvd.rank()]

    def _is_due(self, name: str) -> bool:
        shift = FRAGMENT[name] * self.every // self.fragments if self.fragments > 1 else 0
        return (self.steps - self.after + shift) % self.every == 0


def step_of(optimizer: Any) -> Any:
    def step(params: Any, state: Any, target: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, target), state, params)
        return optax.apply_updates(params, updates), state

    return step


POLICIES: dict[str, tuple[Callable[[], hvd.Sync], dict[str, Any]]] = {
    "every 1": (lambda: hvd.LocalSGD(1), {"every": 1}),
    "every 3": (lambda: hvd.LocalSGD(3), {"every": 3}),
    "after 4": (lambda: hvd.LocalSGD(every=3, after=4), {"every": 3, "after": 4}),
    "DiLoCo": (lambda: hvd.DiLoCo(2), {"every": 2, "outer": (0.7, 0.9)}),
    "fragments after 2": (
        lambda: hvd.DiLoCo(4, after=2, fragments=2),
        {"every": 4, "after": 2, "outer": (0.7, 0.9), "fragments": 2},
    ),
}


@on_ranks(3, (2, "mpi_ring"))
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_against_the_definition(name: str, compiled: bool) -> None:
    policy, played = POLICIES[name]
    optimizer = hvd.DistributedOptimizer(optax.sgd(LR), sync=policy(), name="defined")
    step = jax.jit(step_of(optimizer)) if compiled else step_of(optimizer)
    params = parameters()
    state, play = optimizer.init(params), Play(**played)
    for number in range(STEPS):
        params, state = step(params, state, batch(number, hvd.rank()))
        for key, expected in play.step().items():
            np.testing.assert_allclose(params[key], expected, rtol=1e-4, atol=1e-5)
        shown = jax.tree.map(np.asarray, optimizer.synchronized(params, state))
        assert len({str(each) for each in hvd.allgather_object(jax.tree.map(lambda leaf: leaf.tolist(), shown))}) == 1


@on_ranks(3, (2, "mpi_ring"))
def test_looking_and_going_on_from_a_checkpoint() -> None:
    """A look has no effect on training, and a rank's own parameters and state go on bit by bit."""
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LR))
    optimizer = hvd.DistributedOptimizer(chain, sync=hvd.DiLoCo(3), name="looked at")
    whole = optax.chain(optimizer, optax.scale(1.0))
    step = jax.jit(step_of(whole))
    params = parameters()
    state = whole.init(params)
    kept = []
    for number in range(STEPS):
        kept.append(jax.tree.map(np.asarray, (params, state)))
        optimizer.synchronized(params, state)
        params, state = step(params, state, batch(number, hvd.rank()))
    for begin in range(STEPS):
        other, its = jax.tree.map(jnp.asarray, kept[begin])
        for number in range(begin, STEPS):
            other, its = step(other, its, batch(number, hvd.rank()))
        for one, another in zip(jax.tree.leaves((params, state)), jax.tree.leaves((other, its)), strict=True):
            np.testing.assert_array_equal(one, another)


@on_ranks(3, (2, "mpi_ring"))
def test_a_round_may_end_early() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), sync=hvd.LocalSGD(100), backward_passes_per_step=2)
    params = jnp.zeros(3)
    state = optimizer.init(params)
    for rounds in range(2):
        for _ in range(4):
            updates, state = optimizer.update(jnp.full(3, 2.0 ** hvd.rank()), state, params)
            params = optax.apply_updates(params, updates)
        params, state = optimizer.end_round(params, state)
        params, state = optimizer.end_round(params, state)
        mean = sum(2.0**rank for rank in range(hvd.size())) / hvd.size()
        np.testing.assert_allclose(params, -4 * mean * (rounds + 1), rtol=1e-6)


@pytest.mark.soak
@on_ranks(4)
def test_sets_that_step_alike() -> None:
    sets = [horovodish.add_process_set(ranks) for ranks in ([0, 1], [2, 3])]
    own_set = sets[hvd.rank() // 2]
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), sync=hvd.Hierarchical(own_set, every=2), name="sets")
    params = jnp.zeros(3)
    state = optimizer.init(params)
    for number in range(4):
        updates, state = optimizer.update(jnp.full(3, 2.0 ** hvd.rank()), state, params)
        params = optax.apply_updates(params, updates)
        of_sets = 1.5 if hvd.rank() < 2 else 6.0
        expected = -3.75 * (number + 1) if number % 2 else -3.75 * number - of_sets
        np.testing.assert_allclose(params, expected, rtol=1e-6)
    for each in sets:
        horovodish.remove_process_set(each)


class Anchored(hvd.Sync):
    """A policy that remembers where training began."""

    def begin(self, parameter: Any) -> tuple[Any, ...]:
        return (parameter,)

    def merge(self, start: Any, change: Any, memory: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return (memory[0] + start + change) / 2, memory


@on_ranks(2)
def test_a_policy_remembers_the_parameters_of_the_first_round() -> None:
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), sync=Anchored(2, after=1), name="anchored")
    state = optimizer.init(jnp.zeros(3))
    params = jnp.full(3, 8.0)
    for _ in range(5):
        updates, state = optimizer.update(jnp.ones(3), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(params, [5.5] * 3)  # 7; (7 + 5) / 2 = 6; (7 + 4) / 2


@on_ranks(2)
def test_ranks_with_different_policies() -> None:
    policy = [hvd.LocalSGD(1), hvd.LocalSGD(2)][hvd.rank()]
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), sync=policy, name="different")
    state = optimizer.init(jnp.zeros(3))

    def train() -> None:
        nonlocal state
        for _ in range(2):
            _, state = jax.block_until_ready(optimizer.update(jnp.ones(3), state, jnp.zeros(3)))

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"rank 1 has '.*LocalSGD\(every=2\)"):
        train()


@on_ranks(2)
def test_the_guide() -> None:
    block = next(block for block in python_blocks("docs/slow_machines.md") if "optax" in block)
    given = {"optax": optax, "parameters": parameters(), "gradients": batch(0, hvd.rank()), "evaluate": str}
    exec(block, given)
    assert hvd.allgather_object(given["accuracy"]) == [given["accuracy"]] * hvd.size()
    expected = jax.tree.map(lambda leaf: leaf.tolist(), given["parameters"])
    assert hvd.broadcast_object(expected) == expected


@on_ranks(2)
def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overlap=1 is for PyTorch"):
        hvd.DistributedOptimizer(optax.sgd(1.0), sync=hvd.DiLoCo(4, overlap=1))
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), sync=hvd.LocalSGD(4))
    state = optimizer.init(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"Remedy: call update\(gradients, state, params\)"):
        optimizer.update(jnp.zeros(3), state)
    for others in ((), (state, state)):
        with pytest.raises(ValueError, match=f"contains {len(others)} states of optimizers with sync="):
            optimizer.end_round(jnp.zeros(3), others)
    with pytest.raises(ValueError, match="nothing to go back to"):
        hvd.elastic.JaxState(state=hvd.DistributedOptimizer(optax.sgd(1.0), sync=hvd.DiLoCo(4, fragments=2)).init({}))
