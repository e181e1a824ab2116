"""Clipping by the norm of a whole tree, of which a rank may have pieces only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import optax
from jax import numpy as jnp

from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.reduce_ops import Sum
from horovodish.jax.collectives import allreduce

__all__ = ["clip_by_global_norm"]

_sharing: ContextVar[tuple[str, ProcessSet] | None] = ContextVar("sharing", default=None)


@contextmanager
def sharing(name: str, process_set: ProcessSet) -> Iterator[None]:
    """Transformations get pieces of parameters that these ranks share. The name is that of their reductions."""
    token = _sharing.set((name, process_set))
    try:
        yield
    finally:
        _sharing.reset(token)


def _squares_of_shards(tree: Any) -> jax.Array:
    """The sum of the squares of this rank's elements. The checks know it by its name."""
    wide = jnp.result_type(float)  # the same on all ranks, whichever parameters they have
    squares = [jnp.sum(jnp.square(leaf.astype(wide))) for leaf in jax.tree.leaves(tree)]
    return sum(squares, start=jnp.zeros((), wide))


LOCAL_SQUARES = _squares_of_shards.__name__
_local_squares = jax.jit(_squares_of_shards)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """As `optax.clip_by_global_norm`, and within an optimizer with `shard=` the norm is that of all ranks' pieces.

    Not collective itself. Within `DistributedOptimizer(..., shard=...)` its `update` has an allreduce of one number.
    Elsewhere it is optax's.

    Args:
        max_norm: the norm that updates have at most, all parameters together.

    Returns:
        An optax transformation without state.

    Example:
        >>> tx = optax.chain(hvd.clip_by_global_norm(1.0), optax.adamw(1e-3))
        >>> optimizer = hvd.DistributedOptimizer(tx, shard="states")
    """
    plain = optax.clip_by_global_norm(max_norm)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        among = _sharing.get()
        if among is None:
            return plain.update(updates, state, params)  # type: ignore[no-any-return]
        name, process_set = among
        squares = allreduce(_local_squares(updates), name=f"{name}.norm", op=Sum, process_set=process_set)
        norm = jnp.sqrt(squares)

        def clipped(leaf: jax.Array) -> jax.Array:
            return jnp.where(norm < max_norm, leaf, leaf / norm.astype(leaf.dtype) * max_norm)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(plain.init, update)
