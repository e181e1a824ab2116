"""Clipping by the norm of a whole tree, also where a rank has only pieces of the tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax import numpy as jnp

from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.reduce_ops import Sum
from horovodish.jax.primitive import Traced, run

__all__ = ["clip_by_global_norm"]


@dataclass
class Sharing:
    """An update of pieces of parameters.

    Attributes:
        name: of the reductions.
        process_set: the ranks that share.
        follows: an array with elements that a compiled program computes before its next collective; empty while nothing
            is reduced. Updates and norms are constants on a rank whose parameters are all frozen, or that has no
            elements. All ranks would wait for ever if it began with these.
    """

    name: str
    process_set: ProcessSet
    follows: list[jax.Array]


_sharing: ContextVar[Sharing | None] = ContextVar("sharing", default=None)


@contextmanager
def sharing(name: str, process_set: ProcessSet) -> Iterator[Sharing]:
    """Transformations get pieces of parameters that these ranks share."""
    now = Sharing(name, process_set, [])
    token = _sharing.set(now)
    try:
        yield now
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
    """As `optax.clip_by_global_norm`. Within an optimizer with `shard=` the norm covers the pieces of all ranks.

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
        now = _sharing.get()
        if now is None:
            return plain.update(updates, state, params)  # type: ignore[no-any-return]
        norms = Traced(Operation("allreduce", f"{now.name}.norm", now.process_set, Sum))
        squares = run([norms], [_local_squares(updates)], now.follows)
        now.follows = squares if now.follows else []
        norm = jnp.sqrt(squares[0])

        def clipped(leaf: jax.Array) -> jax.Array:
            return jnp.where(norm < max_norm, leaf, leaf / norm.astype(leaf.dtype) * max_norm)

        return jax.tree.map(clipped, updates), state

    return optax.GradientTransformation(plain.init, update)
