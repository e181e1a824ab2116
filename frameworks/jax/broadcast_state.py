"""The same start on every rank: the values of a model and the state of an optimizer, sent from one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from horovodish._native import DTYPES
from horovodish.comparison import compared_on_all_ranks
from horovodish.jax.primitive import Collective, run
from horovodish.objects import broadcast_object
from horovodish.operation import checked_root
from horovodish.process_sets import ProcessSet, global_process_set

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

Tree = TypeVar("Tree")


def broadcast_parameters(params: Tree, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> Tree:
    """Give every rank the root's values of a tree. Collective; blocks; outside of jit.

    Args:
        params: a tree of arrays of JAX or NumPy, of any dtypes, keys of jax.random among them, of the same structure,
            shapes and dtypes on every rank. Numbers are sent as well. Other leaves, such as the functions in the
            modules of Equinox, stay as they are. The parameters of Flax's linen are such a tree, and so are
            `nnx.state(model)` and a module of Equinox.
        root_rank: whose values to send, the same on every rank.
        process_set: the ranks that take part.

    Returns:
        A tree like `params` with the root's values. JAX's arrays cannot be written, so use what is returned.

    Raises:
        ValueError: there is no rank `root_rank` in the process set, this rank is outside of it, or it is used inside of
            jit.
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
        opt_state: what `init` or `update` of an optax optimizer has given, of the same structure on every rank.
        root_rank: whose state to send, the same on every rank.
        process_set: the ranks that take part.

    Returns:
        A tree like `opt_state` with the root's values; hyperparameters of `optax.inject_hyperparams` are among them.

    Raises:
        ValueError, MismatchError: as `broadcast_parameters`.

    Example:
        >>> opt_state = hvd.broadcast_optimizer_state(opt_state, root_rank=0)
    """
    return _broadcast(opt_state, root_rank, "broadcast_optimizer_state", process_set)


def _broadcast(tree: Tree, root_rank: int, what: str, process_set: ProcessSet) -> Tree:
    with compared_on_all_ranks(what, "the trees", process_set) as described:
        root = checked_root(root_rank, process_set)
        pairs, definition = jax.tree_util.tree_flatten_with_path(tree)
        paths, leaves = [jax.tree_util.keystr(path) for path, _ in pairs], [leaf for _, leaf in pairs]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise ValueError(f"{what} works outside of jit only; inside, use hvd.broadcast(tree, root_rank)")
        described += [f"{path}: {_kind(leaf)}" for path, leaf in zip(paths, leaves, strict=True)]

    arrays = {index: leaf for index, leaf in enumerate(leaves) if _is_array(leaf)}
    calls = [
        Collective("broadcast", what, False, (paths[index],), paths[index], root_rank=root, process_set=process_set)
        for index in arrays
    ]
    taken_apart = [_movable(leaf) for leaf in arrays.values()]
    results = run(calls, [array for array, _ in taken_apart]) if calls else []
    for index, result, (_, put_together) in zip(arrays, results, taken_apart, strict=True):
        leaves[index] = put_together(result)

    numbers = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, bool | int | float | complex)}
    if numbers:
        for index, number in broadcast_object(numbers, root, f"{what}.numbers", process_set).items():
            leaves[index] = number
    whole: Tree = jax.tree_util.tree_unflatten(definition, leaves)
    return whole


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
    # As bytes: without jax_enable_x64 JAX would make float32 of float64.
    value = np.asarray(leaf)
    data = np.frombuffer(value.tobytes(), np.uint8)
    return jnp.asarray(data), lambda moved: np.asarray(moved).view(value.dtype).reshape(value.shape).copy()
