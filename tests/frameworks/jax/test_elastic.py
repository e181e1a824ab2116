"""`JaxState`: what it keeps of arrays, what it does about those that a lost rank has spoilt, and ranks that go on."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from horovodish.elastic.memory import Schedule
from horovodish.elastic.state import _Budget
from horovodish.jax.elastic import JaxState
from horovodish.runtime import basics
from support.elastic import COPIES_VARIABLE, Ended, Scene, run_elastic
from support.processes import wait_until
from support.ranks import run_ranks
from support.scripts import output_of
from support.sources import ROOT

STEPS = 8
LEAVES_WITHIN_SECONDS = 1.0

jit: Callable[..., Any] = jax.jit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int4", "bool", "complex64", "uint8"])
def test_arrays_are_kept(dtype: str) -> None:
    values = jnp.arange(6).reshape(2, 3).astype(dtype)
    state = JaxState(tree={"values": values, "none": None}, host=np.float64(0.1), scalar=jnp.asarray(2.0), n=1)
    state.commit()
    state.tree, state.host, state.scalar, state.n = {}, 0, None, 2
    state.restore()
    back = state.tree["values"]
    assert isinstance(back, jax.Array) and back.dtype == dtype
    np.testing.assert_array_equal(np.asarray(back), np.asarray(values))
    assert (state.host, float(state.scalar), state.n) == (np.float64(0.1), 2.0, 1)
    assert state.host.dtype == np.float64


def test_keys_and_types_are_kept() -> None:
    key, weak = jax.random.key(3, impl="rbg"), jnp.full((4,), 1e-3)
    moments = optax.adam(1e-3).init({"w": jnp.ones(3)})
    state = JaxState(key=key, weak=weak, moments=moments)
    state.commit()
    state.key = state.weak = state.moments = None
    state.restore()
    assert jax.random.key_impl(state.key) == jax.random.key_impl(key)
    np.testing.assert_array_equal(jax.random.normal(state.key, [3]), jax.random.normal(key, [3]))
    assert state.weak.weak_type == weak.weak_type
    assert jax.tree.structure(state.moments) == jax.tree.structure(moments)


@jax.tree_util.register_dataclass
@dataclass
class Training:
    """As Flax's TrainState and Equinox's modules: functions are part of the structure."""

    weights: Any
    functions: Any = field(metadata={"static": True})


@dataclass(frozen=True)
class Layer:
    """As a module of Flax's linen."""

    factor: int

    def apply(self, x: Any) -> Any:
        return self.factor * x


def doubled(x: Any) -> Any:
    return 2 * x


@pytest.mark.parametrize("commits_hold", [True, False])
def test_functions_stay_the_same(commits_hold: bool, request: pytest.FixtureRequest) -> None:
    if commits_hold:
        request.getfixturevalue("held")

    def another(x: Any) -> Any:
        return x

    functions = (lambda x: x, doubled, jit(doubled), jax.nn.relu, jnp.add, Layer(3).apply, optax.adam(0.1))
    training = Training(jnp.ones(3), functions)
    state = JaxState(training=training, loss=functions[0], n=1)
    state.commit()
    state.training, state.n = Training(jnp.zeros(3), functions), 2
    state.restore()
    assert state.n == 1 and state.training.weights.tolist() == [1, 1, 1]
    assert jax.tree.structure(state.training) == jax.tree.structure(training)
    state.training = Training(jnp.zeros(3), (another, *functions[1:]))
    with pytest.raises(ValueError, match=r"state.training .*<lambda>, and now it is .*another"):
        state.restore()


def test_flax_and_equinox_are_kept() -> None:
    eqx, linen, nnx = (pytest.importorskip(name) for name in ("equinox", "flax.linen", "flax.nnx"))
    from flax.training.train_state import TrainState

    dense, x = linen.Dense(3), jnp.ones((1, 2))
    training = TrainState.create(apply_fn=dense.apply, params=dense.init(jax.random.key(0), x), tx=optax.adam(0.1))
    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    module = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), lambda x: -x)
    optimizer = nnx.Optimizer(module, optax.adam(0.1), wrt=nnx.Param)
    state = JaxState(training=training, model=model, module=module, both=[optimizer, module])
    state.commit()
    kernel = module.layers[0].kernel[...]
    state.training = training.apply_gradients(grads=training.params)
    state.model = eqx.tree_at(lambda tree: tree.layers[0].weight, model, jnp.zeros((4, 2)))
    optimizer.update(module, nnx.grad(lambda module: module(x).sum())(module))
    assert int(optimizer.step[...]) == 1 and not jnp.array_equal(module.layers[0].kernel[...], kernel)
    state.restore()
    jax.tree.map(np.testing.assert_array_equal, state.training, training)
    assert jnp.array_equal(state.model(x[0]), model(x[0]))
    assert state.module is state.both[1] is module and int(optimizer.step[...]) == 0
    assert jnp.array_equal(module.layers[0].kernel[...], kernel)
    state.training.apply_gradients(grads=training.params)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits are held, and not copied unless they must be."""
    monkeypatch.setattr(Schedule, "is_due", lambda *_: False)
    monkeypatch.setattr(_Budget, "allows", lambda _: True)


@pytest.mark.usefixtures("held")
def test_a_commit_holds_arrays_that_are_not_donated() -> None:
    step = jit(lambda x: x + 1, donate_argnums=0)
    state = JaxState(x=jnp.zeros(3), n=0)
    state.commit()
    x, state.x, state.n = state.x, state.x + 1, 1
    state.restore()
    assert state.n == 0 and state.x is x
    state.commit()
    state.x = step(state.x)
    with pytest.raises(RuntimeError, match="commit 2 was not copied"):
        state.restore()
    state.save()
    step(state.x)
    state.restore()
    assert state.x.tolist() == [1, 1, 1]


@pytest.mark.usefixtures("held")
def test_the_commit_before_is_held_until_the_last_one_is_computed() -> None:
    state = JaxState(x=jnp.zeros(3), n=0)
    state.commit()
    state.x, state.n = state.x + 1, 1
    state.commit()
    found = state._held_commit()
    assert found is not None and found.position[2] == 2
    state.x.delete()  # as if the program that computes it had failed
    found = state._held_commit()
    assert found is not None and found.position[2] == 1


def test_within_a_window_nothing_is_committed() -> None:
    run_ranks(commit_within_windows, 1)


def commit_within_windows() -> None:
    hvd.init()
    parameters = {"w": jnp.ones(2)}
    for tx in (
        hvd.DistributedOptimizer(optax.sgd(1.0), backward_passes_per_step=2),
        optax.MultiSteps(optax.sgd(1.0), 2),
    ):
        moments = tx.init(parameters)
        commits = []
        for _ in range(4):
            _, moments = tx.update(parameters, moments, parameters)
            state = JaxState(deep=[{"moments": (moments,)}])
            state.commit()
            commits.append(state._position[2])
        assert commits == [0, 1, 0, 1]


def train_through_a_loss(scene: Scene, step_kind: str) -> dict[str, Any]:
    """Process 1 dies in one of its steps; the others do not look at results before they commit."""
    seen: list[int] = []

    def step(x: jax.Array, number: jax.Array, zeros: jax.Array) -> jax.Array:
        seen.append(hvd.size())
        total = hvd.allreduce(jnp.full(3, number) * hvd.size(), op=hvd.Average, name="first")
        more = hvd.allreduce(jnp.full(3, number, jnp.bfloat16), op=hvd.Average, name="second")
        return x + total / hvd.size() + more + (zeros @ zeros)[0, 0]

    compiled = jit(step, donate_argnums=[0] if step_kind == "donating" else [])
    zeros = jnp.zeros([300, 300])  # so much to compute that JAX does not wait for it
    begun = 0

    @hvd.elastic.run
    def train(state: JaxState) -> None:
        nonlocal begun
        while state.step < STEPS:
            begun += 1
            if scene.me == 1 and state.step == 4 and scene.first_time("dies"):
                scene.die("dies")
            if step_kind == "computing" and state.step == 4 and scene.first_time("computes"):
                wait_until(basics.is_cut_off)  # the launcher has told this rank, which has no collective under way
            state.x = compiled(state.x, jnp.float32(state.step), zeros)
            state.history = [*state.history, state.step]
            state.step += 1
            state.commit()

    state = JaxState(step=0, x=jnp.zeros(3), history=[])
    train(state)
    return {
        "x": np.asarray(state.x),
        "history": state.history,
        "begun": begun,
        "start": scene.start,
        "sizes": sorted(set(seen)),
    }


def check(ended: Ended, start: int, results: int, repeated: int = 1) -> None:
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert [result["start"] for result in ended.results] == [start] * results, ended.said
    for result in ended.results:
        assert result["history"] == list(range(STEPS)), "no step is lost, and none counts twice"
        assert result["x"].tolist() == [2.0 * sum(range(STEPS))] * 3
        assert result["begun"] <= STEPS + repeated


@pytest.mark.parametrize(
    ("step_kind", "copies"),
    [
        ("jit", "always"),
        pytest.param("jit", "never", marks=pytest.mark.soak),
        pytest.param("donating", "always", marks=pytest.mark.soak),
        ("computing", "never"),
    ],
)
def test_survivors_go_on(step_kind: str, copies: str, tmp_path: Path) -> None:
    env = {COPIES_VARIABLE: copies}
    ended = run_elastic(train_through_a_loss, tmp_path, 3, step_kind, flags=["--min-np", "2"], env=env)
    check(ended, 0, 2, repeated=2 if copies == "never" else 1)  # JAX runs a step ahead
    assert "in the same processes" in ended.said
    assert [result["sizes"] for result in ended.results] == [[2, 3]] * 2, "programs are compiled anew"


def steps_with_shards(
    scene: Scene | None, tx: optax.GradientTransformation, state: JaxState, until: int = STEPS
) -> None:
    """Steps whose gradients are the same on all ranks. Process 1 dies before step 3, and process 2 before step 6."""

    @jit
    def step(values: Any, moments: Any, number: jax.Array) -> tuple[Any, Any]:
        gradients = jax.tree.map(lambda leaf: jnp.sin(leaf + number), values)
        updates, moments = tx.update(gradients, moments, values)
        return optax.apply_updates(values, updates), moments

    while state.step < until:
        if scene is not None and (scene.me, state.step) in ((1, 3), (2, 6)) and scene.first_time("dies"):
            scene.die("dies")
        state.values, state.moments = step(state.values, state.moments, jnp.float32(state.step))
        state.step += 1
        state.commit()


def shared_state(tx: optax.GradientTransformation) -> JaxState:
    values = {"kernel": jnp.arange(15.0).reshape(3, 5), "bias": jnp.ones(7), "scale": jnp.float32(2.0)}
    return JaxState(values=values, moments=tx.init(values), step=0)


def train_with_shards(scene: Scene, shard_by: str) -> dict[str, Any]:
    hvd.init()
    tx = hvd.DistributedOptimizer(optax.adamw(0.1), shard="states", shard_by=shard_by)
    state = shared_state(tx)
    hvd.elastic.run(lambda state: steps_with_shards(scene, tx, state))(state)
    whole = hvd.broadcast_object(jax.device_get(hvd.full_state((state.values, state.moments))))
    pieces = [leaf.size for leaf in jax.tree.leaves(state.moments.inner)]
    return {"whole": whole, "start": scene.start, "size": hvd.size(), "elements": sum(pieces)}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "least", "shard_by"),
    [
        pytest.param(4, 1, "element", marks=pytest.mark.soak),
        pytest.param(3, 1, "parameter", marks=pytest.mark.soak),
        pytest.param(3, 1, "element", marks=pytest.mark.soak),
        (2, 2, "element"),
    ],
)
def test_the_ranks_that_are_left_share_the_state_anew(ranks: int, least: int, shard_by: str, tmp_path: Path) -> None:
    """Two of four, one of three, and two new ones."""
    ended = run_elastic(train_with_shards, tmp_path, ranks, shard_by, flags=["--min-np", str(least)])
    assert ended.status == 0, ended.said
    assert ended.fired == {f"dies {victim}" for victim in (1, 2) if victim < ranks}
    left, start = (2, 1) if least == ranks else (ranks - 2, 0)
    assert [(result["size"], result["start"]) for result in ended.results] == [(left, start)] * left
    assert sum(result["elements"] - 1 for result in ended.results) == 2 * 23, "each moment is on one rank"
    tx = optax.adamw(0.1)
    expected = shared_state(tx)
    steps_with_shards(None, tx, expected)
    for result in ended.results:
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5),
            result["whole"],
            (expected.values, expected.moments),
        )


def leave_before_the_last_step_is_computed(scene: Scene, folder: str) -> dict[str, Any]:
    """Process 1 dies in the last step, which the others have dispatched; it gives them time to leave their loop."""

    def step(x: jax.Array, number: jax.Array, zeros: jax.Array) -> jax.Array:
        total = hvd.allreduce(jnp.full(3, number), op=hvd.Average, name="step")
        return x + total + (zeros @ zeros)[0, 0]

    compiled = jit(step)
    zeros = jnp.zeros([300, 300])
    state = JaxState(step=0, x=jnp.zeros(3))
    while True:
        with hvd.elastic.attempt(state):
            if state.step == STEPS:
                break
            if scene.me == 1 and state.step == STEPS - 1 and scene.first_time("dies"):
                ends_at = time.monotonic() + LEAVES_WITHIN_SECONDS
                while not os.listdir(folder) and time.monotonic() < ends_at:
                    time.sleep(0.01)
                scene.die("dies")
            state.x = compiled(state.x, jnp.float32(state.step), zeros)
            state.step += 1
    Path(folder, f"{hvd.rank()} has left").touch()
    return {"x": np.asarray(state.x).tolist(), "size": hvd.size()}


@pytest.mark.soak
@pytest.mark.parametrize("copies", ["always", "never"])
def test_a_loss_in_the_last_step_of_a_loop_is_seen_before_the_loop_ends(copies: str, tmp_path: Path) -> None:
    env, folder = {COPIES_VARIABLE: copies}, tmp_path / "left"
    folder.mkdir()
    ended = run_elastic(
        leave_before_the_last_step_is_computed, tmp_path, 3, str(folder), flags=["--min-np", "2"], env=env
    )
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert ended.results == [{"x": [float(sum(range(STEPS)))] * 3, "size": 2}] * 2


@pytest.mark.soak
def test_new_processes_go_on(tmp_path: Path) -> None:
    ended = run_elastic(train_through_a_loss, tmp_path, 2, "donating", flags=["--min-np", "2"])
    check(ended, 1, 2)
    assert all(result["begun"] < STEPS for result in ended.results), "they begin where the earlier ones have been"


@pytest.mark.soak
def test_the_example() -> None:
    output = output_of(ROOT / "examples/elastic_jax.py", np=2, flags=["--min-np", "1"])
    accuracy = re.search(r"^test accuracy (\d\.\d+) on 2 ranks$", output, re.MULTILINE)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 0.93
