"""`JaxState`: what it keeps of arrays, what it does about those that a lost rank has spoilt, and ranks that go on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from horovodish import basics
from horovodish.jax.elastic import JaxState
from support.elastic import Ended, Scene, run_elastic
from support.processes import wait_until
from support.ranks import run_ranks
from support.scripts import output_of
from support.sources import ROOT

STEPS = 8

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
    key, weak = jax.random.key(3, impl="rbg"), jax.jit(lambda: 1.5)()
    moments = optax.adam(1e-3).init({"w": jnp.ones(3)})
    state = JaxState(key=key, weak=weak, moments=moments)
    state.commit()
    state.key = state.weak = state.moments = None
    state.restore()
    assert jax.random.key_impl(state.key) == jax.random.key_impl(key)
    np.testing.assert_array_equal(jax.random.normal(state.key, [3]), jax.random.normal(key, [3]))
    assert state.weak.weak_type == weak.weak_type
    assert jax.tree.structure(state.moments) == jax.tree.structure(moments)


def test_a_donated_state_goes_back_to_its_last_commit() -> None:
    step = jit(lambda x: x + 1, donate_argnums=0)
    state = JaxState(x=jnp.zeros(3), n=0)
    state.commit()
    state.x, state.n = step(state.x), 1
    state.cut_off()
    assert state.n == 1, "what can be read stays"
    step(state.x)
    state.cut_off()
    assert state.n == 0 and state.x.tolist() == [0, 0, 0]


def commit_while_computing(folder: str) -> None:
    hvd.init()
    step = jit(lambda x, zeros: hvd.allreduce(x, name="step") + (zeros @ zeros)[0, 0])
    state, zeros = JaxState(x=jnp.zeros(3)), jnp.zeros([300, 300])
    state.sync()
    state.x = step(state.x, zeros)
    state.commit()
    dispatched = Path(folder, "dispatched")
    if hvd.rank() == 1:
        wait_until(dispatched.exists)
    state.x = step(state.x, zeros)
    dispatched.touch()
    state.commit()
    assert state._kept.newest is not None
    assert state._kept.newest.position == state._position, "the step counts"


def test_a_commit_waits_for_what_is_computed(tmp_path: Path) -> None:
    run_ranks(commit_while_computing, 2, args=(str(tmp_path),))


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


def check(ended: Ended, start: int, results: int) -> None:
    assert ended.status == 0, ended.said
    assert ended.fired == {"dies 1"}
    assert [result["start"] for result in ended.results] == [start] * results, ended.said
    for result in ended.results:
        assert result["history"] == list(range(STEPS)), "no step is lost, and none counts twice"
        assert result["x"].tolist() == [2.0 * sum(range(STEPS))] * 3
        assert result["begun"] <= STEPS + 1


@pytest.mark.parametrize("step_kind", ["jit", "donating", "computing"])
def test_survivors_go_on(step_kind: str, tmp_path: Path) -> None:
    ended = run_elastic(train_through_a_loss, tmp_path, 3, step_kind, flags=["--min-np", "2"])
    check(ended, 0, 2)
    assert "in the same processes" in ended.said
    assert [result["sizes"] for result in ended.results] == [[2, 3]] * 2, "programs are compiled anew"


def test_new_processes_go_on(tmp_path: Path) -> None:
    ended = run_elastic(train_through_a_loss, tmp_path, 2, "donating", flags=["--min-np", "2"])
    check(ended, 1, 2)
    assert all(result["begun"] < STEPS for result in ended.results), "they begin where the earlier ones have been"


def test_the_example() -> None:
    output = output_of(ROOT / "examples/elastic_jax.py", np=2, flags=["--min-np", "1"])
    accuracy = re.search(r"^test accuracy (\d\.\d+) on 2 ranks$", output, re.MULTILINE)
    assert accuracy is not None, output
    assert float(accuracy[1]) >= 0.93
