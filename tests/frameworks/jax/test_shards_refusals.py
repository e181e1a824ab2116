"""What sharded optimizers refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
from support.jax_sharded import (
    normed,
)
from support.on_ranks import on_ranks


@on_ranks(2)
def test_optimizers_that_look_at_several_parameters_are_refused() -> None:
    values = {"bias": jnp.ones(64), "kernel": jnp.ones((8, 16))}
    for make, text in {
        lambda: optax.chain(
            optax.clip_by_global_norm(1.0), optax.lamb(1.0)
        ): r"for \['bias'\] follows from \['kernel'\]",
        lambda: optax.contrib.prodigy(): "the result for .* follows from",
        lambda: optax.flatten(optax.adam(1.0)): "depends on which parameters there are",
        lambda: optax.add_noise(0.1, 0.5, key=1): "it draws noise",
        lambda: optax.apply_if_finite(optax.sgd(1.0), 3): "follows from",
    }.items():
        tx = hvd.DistributedOptimizer(make(), shard="states", shard_by="parameter")
        with pytest.raises(ValueError, match=rf'shard_by="parameter" cannot be used .*{text}.*Remedy'):
            tx.update(values, tx.init(values), values)
    tx = hvd.DistributedOptimizer(optax.lars(1.0), shard="states", shard_by="parameter")
    with pytest.raises(ValueError, match=r"there are 1 with elements for 2 ranks. Remedy: leave shard= out"):
        tx.init([jnp.ones(3), jnp.ones(0)])
    state = tx.init(values)
    with pytest.raises(NotImplementedError, match=r'shard_by="parameter" has no derivative.*Remedy'):
        jax.grad(lambda gradients: tx.update(gradients, state, values)[0]["bias"].sum())(values)
    with pytest.raises(NotImplementedError, match=r'vmap of an optimizer with shard_by="parameter".*Remedy'):
        jax.vmap(lambda scale: tx.update(jax.tree.map(lambda leaf: leaf * scale, values), state, values)[0])(
            jnp.ones(2)
        )


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "clip": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "reduce_sum does not compute each"),
    "lamb": (lambda: optax.lamb(1e-3), "does not compute each element of"),
    "lars": (lambda: optax.lars(1e-3), "does not compute each element of"),
    "adafactor": (lambda: optax.adafactor(1e-3), "does not compute each element of"),
    "muon": (lambda: optax.contrib.muon(1e-3), "depends on the shape of a parameter"),
    "sm3": (lambda: optax.sm3(1e-3), "its state depends on the shape of a parameter"),
    "lbfgs": (lambda: optax.scale_by_lbfgs(), "has no number for each element of one parameter"),
    "noise": (lambda: optax.add_noise(0.1, 0.5, key=1), "with another number, such as noise"),
    "finite": (lambda: optax.apply_if_finite(optax.sgd(1.0), 3), "reduce_and does not compute each element"),
    "large": (
        lambda: optax.masked(optax.sgd(1.0, 0.9), lambda tree: jax.tree.map(lambda leaf: leaf.size > 60, tree)),
        "depends on the shape of a parameter",
    ),
    "others": (
        lambda: optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: leaf + updates["scale"], updates)),
        r"add combines \['bias'\] with \['scale'\]",
    ),
    "counting": (
        lambda: optax.stateless(lambda u, _: jax.tree.map(lambda leaf: leaf / jnp.ones_like(leaf).sum(), u)),
        "depends on the shape of a parameter",
    ),
    "positions": (
        lambda: optax.stateless(
            lambda u, _: jax.tree.map(lambda leaf: leaf * jnp.arange(leaf.size).reshape(leaf.shape), u)
        ),
        "with another number",
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_do_not_work_by_element_are_refused(name: str) -> None:
    make, text = REFUSED[name]
    values = {"bias": jnp.ones(64), "scale": jnp.float32(1.0)}
    if name == "others":
        values["scale"] = jnp.ones(64)
    else:
        values["kernel"] = jnp.ones((8, 16))
    tx = hvd.DistributedOptimizer(make(), shard="states")
    with pytest.raises(
        ValueError, match=f'shard= cannot be used with this optimizer: .*{text}.*Remedy.*pass shard_by="parameter"'
    ):
        tx.update(values, tx.init(values), values)


@on_ranks(2)
def test_each_way_of_an_update_is_checked() -> None:
    """Also one that an argument switches on later."""
    tx = hvd.DistributedOptimizer(normed(), shard="states")
    values = {"kernel": jnp.ones((2, 3))}
    state = tx.init(values)
    for _ in range(2):
        _, state = tx.update(values, state, values, normed=False, value=1.5)
    with pytest.raises(ValueError, match="reduce_sum does not compute each element"):
        tx.update(values, state, values, normed=True, value=1.5)


@on_ranks(2)
def test_a_rank_that_joins_is_an_error() -> None:
    tx = hvd.DistributedOptimizer(optax.sgd(1.0), shard="states")
    values = jnp.ones(5)
    tx.update(values, tx.init(values))
    if hvd.rank() == 0:
        with pytest.raises(MismatchError, match=r"join\(\), and its part of the parameters"):
            tx.update(values, tx.init(values))
        with pytest.raises((ValueError, RuntimeError), match="the ranks gave 12 bytes, but the program was compiled"):
            jax.block_until_ready(jax.jit(tx.update)(values, tx.init(values)))
    hvd.join()


@on_ranks(2)
def test_what_is_refused() -> None:
    adam = optax.adam(1e-3)
    with pytest.raises(ValueError, match="op=Adasum reduces steps of whole parameters"):
        hvd.DistributedOptimizer(adam, op=hvd.Adasum, shard="states")
    with pytest.raises(ValueError, match=r"shard='all' is not known"):
        hvd.DistributedOptimizer(adam, shard="all")
    tx = hvd.DistributedOptimizer(adam, shard="states")
    with pytest.raises(
        UnsupportedTensorError, match=r"parameter \['count'\]: .* not int32. Remedy: give the optimizer"
    ):
        tx.init({"count": jnp.arange(3), "kernel": jnp.ones(3)})
    values = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    state = tx.init(values)
    with pytest.raises(ValueError, match=r"gradients of the shapes \[\(2, 3\)\], but init\(\) got"):
        tx.update({"kernel": values["kernel"], "bias": None}, state, values)
    with pytest.raises(ValueError, match="full_state works outside of jit only"):
        jax.jit(hvd.full_state)(state)
    load = hvd.load_full_state
    with pytest.raises(ValueError, match=r"the state has float32\[4, 3\] where the optimizer has float32\[2, 3\]"):
        load(state, adam.init({**values, "kernel": jnp.ones((4, 3))}))
    with pytest.raises(ValueError, match=r"load_full_state: the state is PyTreeDef.*pass the shapes of jax.eval_shape"):
        load(state, optax.sgd(1.0, 0.9).init(values))
    with pytest.raises(ValueError, match="load_full_state: each rank has a part of its own"):
        load(state, state)
    assert hvd.full_state(values) is values
