"""PowerSGD inside and outside of jit: against a model of the paper's algorithm, with its errors in the state."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest
from jax import numpy as jnp

import horovodish.jax as hvd
from support.approximated import MATRIX, SHAPE, Floats, follows_the_model
from support.on_ranks import on_ranks

powersgd = hvd.Compression.powersgd


def of_weight(name: str, shape: tuple[int, ...]) -> bool:
    return name == "weight"


@on_ranks(3)
@pytest.mark.parametrize("start", [0, 2])
def test_averages_follow_the_model(start: int) -> None:
    compression = powersgd(start=start, where=of_weight)
    parameters = {"weight": jnp.zeros(SHAPE), "bias": jnp.zeros(4)}
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), name=f"from step {start}", compression=compression)
    state: Any = optimizer.init(parameters)
    update = jax.jit(optimizer.update) if start else optimizer.update

    def step(gradient: Floats) -> tuple[Any, Any]:
        nonlocal state
        gradients = {"weight": jnp.asarray(gradient), "bias": jnp.full(4, hvd.rank())}
        updates, state = update(gradients, state, parameters)
        assert (updates["bias"] == -1).all()
        return -updates["weight"], state.kept["weight"].error

    follows_the_model(step, start)


@on_ranks(2)
def test_windows_and_values_that_are_not_finite() -> None:
    parameters = {"weight": jnp.zeros(MATRIX)}
    compression = powersgd(where=of_weight)
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), compression=compression, backward_passes_per_step=2)
    update, state = jax.jit(optimizer.update), optimizer.init(parameters)
    own = jax.random.normal(jax.random.key(hvd.rank()), MATRIX)
    for number in range(6):
        before: Any = state
        gradient = own.at[1, 1].set(jnp.inf) if number == 3 and hvd.rank() else own
        updates, state = update({"weight": gradient}, state, parameters)
        if number % 2 == 0:
            assert not updates["weight"].any()
        elif number == 3:
            assert jnp.isnan(updates["weight"]).all()
            assert jax.tree.all(jax.tree.map(jnp.array_equal, state.inner.kept, before.inner.kept))
        else:
            assert jnp.isfinite(updates["weight"]).all() and updates["weight"].any()


@on_ranks(2)
def test_ranks_with_other_options_are_told() -> None:
    parameters = {"weight": jnp.zeros(MATRIX), "bias": jnp.zeros(4)}
    compression = powersgd(start=5 + hvd.rank(), where=of_weight)
    optimizer = hvd.DistributedOptimizer(optax.sgd(1.0), compression=compression)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"powersgd\(2\), start=5"):
        jax.block_until_ready(jax.jit(optimizer.update)(parameters, optimizer.init(parameters), parameters))
    with pytest.raises(hvd.MismatchError, match=r"start=5 on rank 0, and .* with start=6 on rank 1"):
        optimizer.update(parameters, optimizer.init(parameters), parameters)


@on_ranks(2)
def test_functions_without_state_refuse_it() -> None:
    with pytest.raises(
        ValueError, match=r"powersgd\(2\) is for DistributedOptimizer of PyTorch and JAX without sync=; use int8"
    ):
        hvd.grad(jnp.sum, compression=powersgd())
