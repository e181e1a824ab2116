"""Gradients that are added up on a rank for several calls before they are reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax import numpy as jnp


class AccumulationState(NamedTuple):
    """The state of an optimizer that adds gradients up.

    Attributes:
        inner: the state of the optimizer that takes their sum.
        accumulated: the sum so far.
        passes: how many gradients it has.
    """

    inner: Any
    accumulated: Any
    passes: jax.Array


def accumulating(tx: optax.GradientTransformationExtraArgs, passes: int) -> optax.GradientTransformationExtraArgs:
    """An optimizer that gives `tx` the sum of the gradients of several calls, in the last of them."""

    def init(params: Any) -> AccumulationState:
        return AccumulationState(tx.init(params), jax.tree.map(_nothing_yet, params), jnp.zeros((), jnp.int32))

    def update(
        updates: Any, state: AccumulationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AccumulationState]:
        accumulated = _with_gradients(
            lambda new, total: total if new is None else total + jnp.asarray(new, total.dtype),
            updates,
            state.accumulated,
        )

        def step() -> tuple[Any, AccumulationState]:
            total = _with_gradients(
                lambda new, total: None if new is None else total.astype(jnp.result_type(new)), updates, accumulated
            )
            changes, inner = tx.update(total, state.inner, params, **extra)
            return changes, AccumulationState(
                inner, jax.tree.map(jnp.zeros_like, accumulated), jnp.zeros_like(state.passes)
            )

        def wait() -> tuple[Any, AccumulationState]:
            changes = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(step)[0])
            return changes, AccumulationState(state.inner, accumulated, state.passes + 1)

        outcome: tuple[Any, AccumulationState] = jax.lax.cond(state.passes + 1 >= passes, step, wait)
        return outcome

    return optax.GradientTransformationExtraArgs(init, update)


def _with_gradients(function: Callable[[Any, Any], Any], gradients: Any, others: Any) -> Any:
    """`jax.tree.map` over gradients, any of them None, and over the tree `others` with an entry for each gradient."""
    return jax.tree.map(function, gradients, others, is_leaf=lambda leaf: leaf is None)


def _nothing_yet(value: Any) -> jax.Array:
    dtype = jnp.result_type(value)
    # A sum in few bits loses what each gradient adds to it.
    return jnp.zeros(jnp.shape(value), jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype)
