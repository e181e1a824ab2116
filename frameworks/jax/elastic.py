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

import operator
import sys
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

from horovodish import elastic
from horovodish.collectives.process_sets import global_process_set
from horovodish.elastic import *  # noqa: F403
from horovodish.elastic import State
from horovodish.elastic.snapshots import Held, Reference
from horovodish.gradients.sync import check_rounds
from horovodish.jax.accumulation import AccumulationState
from horovodish.jax.shards.state import ShardedState, full_state, parts_in, shared_anew
from horovodish.jax.sync import SyncState
from horovodish.jax.trees import with_weak_type
from horovodish.runtime import basics

__all__ = ["JaxState"]
__all__ += elastic.__all__


class JaxState(State):
    """A state with JAX arrays of any dtype, also keys of jax.random.

    A commit refers to the arrays. If they are donated to a program, the commit loses them, and a recovery goes back to
    the newest copy.

    Functions in the state stay the same functions, such as `apply_fn` and `tx` of Flax's TrainState, and the
    activations in an Equinox module. Flax nnx modules and optimizers stay the same objects: a recovery sets their
    arrays back, and does not change their other attributes.

    A recovery puts arrays onto the default device. When the ranks have changed, all programs are compiled again,
    because they may contain a rank or a number of ranks.

    With the state of an optimizer with `shard=`, each `commit()` that copies is collective, and so is `save()`: one
    rank of each host copies the state of all ranks. After a loss the remaining ranks divide it among themselves.

    Args:
        attributes: the first attributes: trees of arrays, numbers and everything that can be pickled.

    Raises:
        ValueError: one of them is the state of an optimizer with `shard=` and a process set, or with `sync=` and
            several fragments.

    Example:
        >>> state = hvd.elastic.JaxState(parameters=parameters, key=jax.random.key(0), epoch=0)
    """

    def __init__(self, **attributes: Any) -> None:
        self._gathered: dict[int, Any] = {}  # while this rank copies: by id of the part, the full state of an optimizer
        layouts = [part.layout for part in parts_in(attributes)]
        if any(each.process_set is not global_process_set for each in layouts):
            raise ValueError(
                "JaxState takes no sharded optimizer of a process set: sets end when a rank is lost. Remedy: leave "
                "process_set= and shard_set= out in elastic jobs"
            )
        rounds = jax.tree_util.tree_leaves(attributes, is_leaf=lambda value: isinstance(value, SyncState))
        check_rounds(max((len(each.ages) for each in rounds if isinstance(each, SyncState)), default=1))
        super().__init__(**attributes)

    def reset(self) -> None:
        """Have programs compiled anew."""
        jax.clear_caches()

    def _has_open_window(self) -> bool:
        return _is_open(list(self._live.values())) or super()._has_open_window()

    def _has_parts(self) -> bool:
        return bool(parts_in(list(self._live.values())))

    def _has_lost_parts(self) -> bool:
        return any(part.place[1] != basics.size() for part in parts_in(list(self._live.values())))

    def _gather_parts(self, roots: Sequence[int]) -> None:
        parts = parts_in(list(self._live.values()))
        by_root = {root: {id(part): full_state(part, root) for part in parts} for root in roots}
        self._gathered = by_root.get(basics.rank(), {})

    def _keeps(self, value: object) -> bool:
        return _is_nnx(value) or _is_function(value) or super()._keeps(value)

    def _kept_of(self, value: Any) -> Any:
        if _is_nnx(value):
            return sys.modules["flax.nnx"].state(value)
        return _name_of(value) if _is_function(value) else super()._kept_of(value)

    def _give_back(self, value: Any, kept: Any) -> None:
        if _is_nnx(value):
            sys.modules["flax.nnx"].update(value, kept)
        elif not _is_function(value):
            super()._give_back(value, kept)
        elif kept != _name_of(value):
            raise ValueError(f"the function was {kept}, and now it is {_name_of(value)}; keep the choice as a number")

    def _finish(self) -> None:
        leaves = jax.tree_util.tree_leaves(list(self._live.values()))
        jax.block_until_ready([leaf for leaf in leaves if isinstance(leaf, jax.Array) and not leaf.is_deleted()])
        super()._finish()

    def _reference_to(self, value: object) -> Reference | None:
        return Reference(value, None) if isinstance(value, jax.Array | ShardedState) else None

    def _is_unchanged(self, held: Held) -> bool:
        return are_readable([reference.value for reference in held.references])

    def _still_held(self, held: list[Held]) -> list[Held]:
        # The program that computes the new one may fail. Wait for the one before, so that JAX runs one step ahead.
        for value, _ in held[0].references if held else ():
            if value.is_deleted():  # donated
                return []
            jax.block_until_ready(value)
        return held[:1]

    def _bytes_of(self, value: Any) -> np.ndarray:
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        array = np.ascontiguousarray(jax.random.key_data(value) if is_key else value)
        return array.reshape(-1).view(np.uint8)

    def _reduced(self, value: object) -> Any:
        if isinstance(value, ShardedState) and id(value) in self._gathered:
            return shared_anew, (self._gathered[id(value)], value.layout)
        if not isinstance(value, jax.Array):
            return NotImplemented
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return _key, (np.asarray(jax.random.key_data(value)), str(jax.random.key_impl(value)))
        return _array, (np.asarray(value), value.weak_type)


def _is_nnx(value: object) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Pytree)


def _is_function(value: Any) -> bool:
    """Return whether a value is a function that pickle would refuse or replace by an equal one.

    To `jax.jit`, and where trees are compared, a function is the same as itself alone.
    """
    if isinstance(value, MethodType):
        # An object that is hashed by its value does not change. Flax's linen modules are such; this may be their apply.
        return type(value.__self__).__hash__ not in (None, object.__hash__) and not isinstance(value.__self__, type)
    if isinstance(value, FunctionType):
        try:
            return operator.attrgetter(value.__qualname__)(sys.modules.get(value.__module__)) is not value
        except AttributeError:
            return True
    # What jax.jit and jax.custom_jvp make has the name of a function.
    return (
        callable(value) and hasattr(value, "__name__") and not isinstance(value, type | BuiltinFunctionType | np.ufunc)
    )


def _name_of(function: Any) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', function.__name__)}"


def _is_window(value: object) -> bool:
    return isinstance(value, AccumulationState | optax.MultiStepsState | SyncState)


def _is_open(tree: Any) -> bool:
    """Whether the state of an optimizer in a tree is within a window of accumulation, or within a round."""
    windows = [leaf for leaf in jax.tree_util.tree_leaves(tree, is_leaf=_is_window) if _is_window(leaf)]
    return any(_counts(window) for window in windows)


def _counts(window: Any) -> bool:
    if isinstance(window, SyncState):
        return int(window.ages.max()) > 0
    if isinstance(window, AccumulationState):
        return int(window.passes) > 0 or _is_open(window.inner)
    return int(window.mini_step) > 0 or _is_open(window.inner_opt_state)


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
    array = jnp.array(value)
    return with_weak_type(array) if weak_type else array


def _key(data: np.ndarray, implementation: str) -> jax.Array:
    key: jax.Array = jax.random.wrap_key_data(jnp.array(data), impl=implementation)
    return key
