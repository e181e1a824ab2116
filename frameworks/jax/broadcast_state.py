"""The same start on every rank: the values of a model and the state of an optimizer, sent from one rank."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from horovodish._native import DTYPES
from horovodish.collectives.adapter import checked_root
from horovodish.collectives.comparison import compared_on_all_ranks
from horovodish.collectives.consistency import without_addresses
from horovodish.collectives.objects import broadcast_object
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import ProcessSet, global_process_set
from horovodish.errors import UnsupportedTensorError
from horovodish.jax.primitive import Traced, run
from horovodish.jax.shards.state import refuse_sharded
from horovodish.jax.trees import with_weak_type
from horovodish.runtime import basics

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

Tree = TypeVar("Tree")


def broadcast_parameters(params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Give every rank the root's values of a tree. Collective; blocks; outside of jit.

    Args:
        params: a tree of arrays of JAX or NumPy, of any dtypes, keys of jax.random among them, of the same structure,
            shapes and dtypes on every rank. Numbers, text and bytes are sent as well. Other leaves, such as the
            functions in the modules of Equinox, and static fields of dataclasses stay as they are. A rank warns if they
            look different from the root's. The parameters of Flax's linen are such a tree, and so are
            `nnx.state(model)` and a module of Equinox.
        root_rank: the rank whose values to send, the same on every rank.
        process_set: the ranks that take part.

    Returns:
        A tree like `params` with the root's values. JAX's arrays cannot be written, so use the result.

    Raises:
        ValueError: there is no rank `root_rank` in the process set, this rank is outside of it, it is used inside of
            jit, or an array was donated.
        UnsupportedTensorError: an array of NumPy holds Python objects.
        MismatchError: the ranks have different trees. `horovodish.collectives` lists the other errors.

    Example:
        >>> parameters = hvd.broadcast_parameters(parameters, root_rank=0)
        >>> nnx.update(model, hvd.broadcast_parameters(nnx.state(model), root_rank=0))
    """
    return _broadcast(params, root_rank, "broadcast_parameters", process_set)


def broadcast_optimizer_state(
    opt_state: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Tree:
    """Give every rank the root's state of an optimizer. Collective; blocks; outside of jit.

    Args:
        opt_state: the state from `init` or `update` of an optax optimizer, with the same structure on every rank.
        root_rank: the rank whose state to send, the same on every rank.
        process_set: the ranks that take part.

    Returns:
        A tree like `opt_state` with the root's values, also for hyperparameters of `optax.inject_hyperparams`.

    Raises:
        ValueError, MismatchError: as `broadcast_parameters`. The state of an optimizer with `shard=` is a ValueError.

    Example:
        >>> opt_state = hvd.broadcast_optimizer_state(opt_state, root_rank=0)
    """
    return _broadcast(opt_state, root_rank, "broadcast_optimizer_state", process_set)


def _broadcast(tree: Tree, root_rank: int, what: str, process_set: ProcessSet) -> Tree:
    with compared_on_all_ranks(what, "the trees", process_set) as described:
        root = checked_root(root_rank, process_set)
        refuse_sharded(tree, what, "give every rank the file, and call hvd.load_full_state(state, full)")
        pairs, definition = jax.tree_util.tree_flatten_with_path(tree)
        paths, leaves = [jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ValueError(f"{what} works outside of jit only; inside, use hvd.broadcast(tree, root_rank)")
        for path, leaf in zip(paths, leaves, strict=True):
            path = path or "the array"
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise ValueError(f"{what}: {path} was donated to a program; pass what the program has returned")
            if isinstance(leaf, np.ndarray) and leaf.dtype.hasobject:
                raise UnsupportedTensorError(f"{what}: {path} is an array of Python objects; use hvd.broadcast_object")
        described += [f"{path} of {_kind(leaf)}" for path, leaf in zip(paths, leaves, strict=True)]
        structure = [
            _looks(leaf) for leaf in (definition, *leaves) if not _is_array(leaf) and not isinstance(leaf, _SENT)
        ]

    arrays = {index: leaf for index, leaf in enumerate(leaves) if _is_array(leaf)}
    operation = Operation("broadcast", what, process_set, root_rank=root)
    calls = [Traced(operation, part=paths[index], members=(paths[index],)) for index in arrays]
    taken_apart = [_movable(leaf) for leaf in arrays.values()]
    results = run(calls, [array for array, _ in taken_apart]) if calls else []
    for index, result, (_, put_together) in zip(arrays, results, taken_apart, strict=True):
        leaves[index] = put_together(result)

    sent = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, _SENT)}
    weak = [index for index in arrays if getattr(arrays[index], "weak_type", False)]
    sent, weak, root_structure = broadcast_object((sent, weak, structure), root, f"{what}.others", process_set)
    for index in weak:
        leaves[index] = with_weak_type(leaves[index])
    for index, value in sent.items():
        leaves[index] = value
    if differences := [
        (ours, theirs) for ours, theirs in zip(structure, root_structure, strict=True) if ours != theirs
    ]:
        warnings.warn(
            f"{what} does not send functions, static fields and other objects. They differ between rank "
            f"{basics.rank()} and rank {root}: {_first_difference(*differences[0])}. Build the trees "
            "alike on every rank",
            RuntimeWarning,
            stacklevel=3,
        )
    whole: Tree = jax.tree_util.tree_unflatten(definition, leaves)
    return whole


_SENT = (bool, int, float, complex, str, bytes)
"""Leaves that are sent as objects."""


def _looks(value: Any) -> str:
    if isinstance(value, set | frozenset):  # a set of strings has another order in each process
        return f"{type(value).__name__} of {sorted(map(_looks, value))}"
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):  # all elements of arrays in static fields, exactly
        return without_addresses(value)


def _first_difference(ours: str, theirs: str) -> str:
    same = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), 0)
    begin = max(same - 20, 0)
    return f"{ours[begin : begin + 60]!r} is {theirs[begin : begin + 60]!r} there"


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if _is_array(leaf) else type(leaf).__name__


def _movable(leaf: Any) -> tuple[Any, Callable[[Any], Any]]:
    """An array that the engine can move, and what makes the leaf of it again."""
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind = jax.random.key_impl(leaf)
            array, back = _movable(jax.random.key_data(leaf))
            return array, lambda moved: jax.random.wrap_key_data(back(moved), impl=kind)
        if leaf.dtype.name in DTYPES:
            return leaf, lambda moved: moved
        array, back = _movable(np.asarray(leaf))
        return array, lambda moved: jax.device_put(back(moved), leaf.sharding)
    value = np.asarray(leaf)
    whole = () if isinstance(leaf, np.generic) else ...
    if value.dtype.name in DTYPES and jax.dtypes.canonicalize_dtype(value.dtype) == value.dtype:
        return jnp.asarray(value), lambda moved: np.array(moved)[whole]  # other ranks may have an array of JAX there
    # As bytes: without jax_enable_x64 JAX would make float32 of float64.
    data = np.frombuffer(value.tobytes(), np.uint8)
    return jnp.asarray(data), lambda moved: np.asarray(moved).view(value.dtype).reshape(value.shape).copy()[whole]
