"""Elastic training with JAX: `horovodish.elastic` with a state that holds trees of arrays.

Example:
    import horovodish.jax as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state):
        while state.step < 1000:
            state.parameters, state.moments = step(state.parameters, state.moments, *batch_of(state.step))
            state.step += 1
            state.commit()

    train(hvd.elastic.JaxState(parameters=parameters, moments=optimizer.init(parameters), step=0))

    $ horovodish run -np 4 --min-np 2 python train.py
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from horovodish.elastic import HorovodInternalError, HostsUpdatedInterrupt, ObjectState, State, attempt, run

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt", "JaxState", "ObjectState", "State", "attempt", "run"]


class JaxState(State):
    """A state whose attributes may hold arrays of JAX, of any dtype, keys of jax.random among them.

    A collective may fail long after its step was dispatched. If arrays of the state depend on that step, or were
    donated to it, the state goes back to its last `commit()`, and the steps since then are repeated. So commit after
    every step. `commit()` waits until the arrays are computed.

    Arrays are put back onto the default device. When the ranks have changed, all programs are compiled anew, since they
    may hold a rank or a number of ranks.

    Args:
        attributes: the first attributes: trees of arrays, numbers and everything that can be pickled.

    Example:
        >>> state = hvd.elastic.JaxState(parameters=parameters, key=jax.random.key(0), epoch=0)
    """

    def save(self) -> None:
        """Copy the state to memory of this host, when its arrays are computed. Not collective.

        Raises:
            TypeError: a part of the state cannot be pickled; the message names it.
        """
        jax.block_until_ready(self._arrays())  # what they need counts towards how far the state is
        super().save()

    def reset(self) -> None:
        """Have programs compiled anew."""
        jax.clear_caches()

    def _is_intact(self) -> bool:
        return are_readable(self._arrays())

    def _arrays(self) -> list[jax.Array]:
        leaves = jax.tree_util.tree_leaves([getattr(self, name) for name in self._names])
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def _reduced(self, value: object) -> Any:
        if not isinstance(value, jax.Array):
            return NotImplemented
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return _key, (np.asarray(jax.random.key_data(value)), str(jax.random.key_impl(value)))
        return _array, (np.asarray(value), value.weak_type)


def are_readable(arrays: list[jax.Array]) -> bool:
    """Whether arrays were neither donated nor left without a value by a program that has failed."""
    if any(array.is_deleted() for array in arrays):
        return False
    try:
        jax.block_until_ready(arrays)
    except Exception:
        return False
    return True


def _array(value: np.ndarray, weak_type: bool) -> jax.Array:
    # Python's numbers have weak types. A program for one would be compiled again for an array of another type.
    array: jax.Array = jnp.asarray(value.item()) if weak_type and value.ndim == 0 else jnp.array(value)
    return array


def _key(data: np.ndarray, implementation: str) -> jax.Array:
    key: jax.Array = jax.random.wrap_key_data(jnp.array(data), impl=implementation)
    return key
