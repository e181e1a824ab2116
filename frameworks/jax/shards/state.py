"""The state of an optimizer that ranks share: which part a rank has, and the whole state of the plain optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from horovodish.collectives.adapter import checked_root
from horovodish.collectives.process_sets import ProcessSet
from horovodish.errors import UnsupportedTensorError
from horovodish.jax.collectives import allgather
from horovodish.jax.shards.by_element import check
from horovodish.jax.shards.layout import Layout, own_bounds
from horovodish.runtime import basics

__all__ = ["full_state", "load_full_state"]

Tree = TypeVar("Tree")

_MARK = 1 << 20


@dataclass(frozen=True)
class ShardedState:
    """The state of an optimizer with `shard=`, on one rank.

    Attributes:
        inner: the state of the wrapped optimizer for this rank's pieces of the parameters.
        part: two arrays of zeros. Their lengths say which part this is, also in files that have shapes only.
        layout: what the part is made of.
    """

    inner: Any
    part: tuple[jax.Array, jax.Array]
    layout: Layout

    @property
    def place(self) -> tuple[int, int]:
        """The number of the rank among those that share, and how many they are."""
        return self.part[0].shape[0] - 1, self.part[1].shape[0]

    def __reduce__(self) -> NoReturn:
        rank, ranks = self.place
        raise ValueError(
            f"the state of an optimizer with shard= cannot be copied or pickled: it is the part of rank {rank} of "
            f"{ranks}. Remedy: pickle what hvd.full_state(state) gives, which any number of ranks load by "
            "hvd.load_full_state"
        )


jax.tree_util.register_dataclass(ShardedState, data_fields=["inner", "part"], meta_fields=["layout"])


def is_sharded(node: object) -> bool:
    """Whether this is a node of a tree whose leaves are one rank's part of a state."""
    return isinstance(node, ShardedState)


def parts_in(tree: Any) -> list[ShardedState]:
    """The sharded states in a tree."""
    return [*filter(is_sharded, jax.tree.leaves(tree, is_leaf=is_sharded))]


def refuse_sharded(tree: Any, what: str, remedy: str) -> None:
    """Raise ValueError if a part of the tree is sharded state."""
    if parts_in(tree):
        raise ValueError(f"{what}: each rank has a part of its own of a sharded optimizer's state. Remedy: {remedy}")


def begin(init: Callable[[Any], Any], params: Any, process_set: ProcessSet) -> ShardedState:
    """The state of an optimizer for this rank's pieces of parameters.

    Raises:
        ValueError: the optimizer is not one that works element by element.
        UnsupportedTensorError: a parameter is no real number.
    """
    found, definition = jax.tree_util.tree_flatten_with_path(params)
    paths, leaves = [jax.tree_util.keystr(path) or "the parameter" for path, _ in found], [leaf for _, leaf in found]
    for path, leaf in zip(paths, leaves, strict=True):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise UnsupportedTensorError(
                f"parameter {path}: shard= takes floating-point parameters, not {jnp.result_type(leaf)}. Remedy: give "
                "the optimizer a tree with None in its place, or leave shard= out"
            )
    shapes = tuple(map(jnp.shape, leaves))
    bounds = tuple(own_bounds(shape, process_set) for shape in shapes)
    # State has a number for each element of a parameter where it has the parameter's shape. Here no two are equal.
    marks = {(_MARK + index, *[1] * (len(shape) - 1)): index for index, shape in enumerate(shapes)}
    marked = [jax.ShapeDtypeStruct(mark, jnp.result_type(leaf)) for mark, leaf in zip(marks, leaves, strict=True)]
    state = jax.tree.leaves(jax.eval_shape(init, jax.tree_util.tree_unflatten(definition, marked)))
    layout = Layout(tuple(paths), shapes, bounds, tuple(marks.get(leaf.shape) for leaf in state), process_set)
    check(init, [params], range(len(leaves)), layout.parameters, layout)
    return _part_of(init(layout.pieces(params)), layout)


def _part_of(inner: Any, layout: Layout) -> ShardedState:
    rank, ranks = layout.process_set.rank(), layout.process_set.size()
    return ShardedState(inner, (jnp.zeros(rank + 1, bool), jnp.zeros(ranks, bool)), layout)


def shared_anew(full: Any, layout: Layout) -> ShardedState:
    """This rank's part of the full state of an optimizer, as the ranks that there are now share it. Not collective.

    Args:
        full: the state of the plain optimizer; the part has memory of its own.
        layout: as other ranks have shared it.
    """
    layout = replace(layout, bounds=tuple(own_bounds(shape, layout.process_set) for shape in layout.shapes))
    leaves, definition = jax.tree_util.tree_flatten(full)
    pieces = [
        leaf if index is None else jnp.array(layout.piece(index, leaf))
        for leaf, index in zip(leaves, layout.parameters, strict=True)
    ]
    return _part_of(jax.tree_util.tree_unflatten(definition, pieces), layout)


def checked_layout(state: Any, process_set: ProcessSet) -> Layout:
    """The layout of a state that belongs to this rank.

    Raises:
        ValueError: it is the state of another rank, of another number of ranks, or of an optimizer without shards.
    """
    load = "state = hvd.load_full_state(optimizer.init(parameters), full)"
    if not isinstance(state, ShardedState):
        raise ValueError(f"update() of an optimizer with shard= got the state of a plain one. Remedy: {load}")
    own = process_set.rank(), process_set.size()
    if state.place != own:
        raise ValueError(
            "update() got the part of rank {} of {} of a sharded optimizer's state, but this is rank {} of {}. Remedy: "
            "save what hvd.full_state(state) gives; any number of ranks take it by {}".format(*state.place, *own, load)
        )
    return state.layout


def full_state(state: Tree, root: int = 0) -> Tree | None:
    """The state of the plain optimizer, of which each rank has a part. Collective; blocks; outside of jit.

    Args:
        state: the state of an optimizer, or a tree that has it, such as `(parameters, state, epoch)`.
        root: which rank gets it.

    Returns:
        On the root a tree in which the state is what the optimizer without `shard=` would have, with arrays of NumPy
        where they were shared out; None on the other ranks. Nothing else changes. A tree without shared state is
        returned as it is.

    Raises:
        ValueError: the root is no rank, or none that has a part; or it is used inside of jit.

    Example:
        >>> full = hvd.full_state((parameters, state))  # on every rank
        >>> if hvd.rank() == 0:
        ...     pickle.dump(jax.device_get(full), file)
    """
    if not parts_in(state):
        return state
    whole = jax.tree.map(lambda node: _gathered(node, root) if is_sharded(node) else node, state, is_leaf=is_sharded)
    return whole if basics.rank() == root else None


def _gathered(state: ShardedState, root: int) -> Any:
    layout, process_set = state.layout, state.layout.process_set
    checked_root(root, process_set)
    leaves, definition = jax.tree_util.tree_flatten(state.inner)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ValueError("full_state works outside of jit only. Remedy: return the state from the program")
    for index, parameter in enumerate(layout.parameters):
        if parameter is not None:
            rows = allgather(leaves[index], name=f"full_state.{index}", process_set=process_set)
            leaves[index] = np.asarray(rows).reshape(layout.shapes[parameter]) if basics.rank() == root else None
    return jax.tree_util.tree_unflatten(definition, leaves)


def load_full_state(state: Tree, full: Any) -> Tree:
    """This rank's part of a state, for an optimizer with `shard=` on any number of ranks. Not collective.

    Args:
        state: what `init` of the optimizer gives here, or a tree that has it.
        full: the same of the optimizer without `shard=`, as `full_state` gives it; on every rank.

    Returns:
        A tree like `state` with the values of `full`. Arrays of NumPy become JAX's.

    Raises:
        ValueError: `full` is of another model or another optimizer, or is itself one rank's part.

    Example:
        >>> parameters, full = pickle.load(file)
        >>> state = hvd.load_full_state(optimizer.init(parameters), full)
    """
    refuse_sharded(full, "load_full_state", "save what hvd.full_state(state) gives rank 0")
    return jax.tree.map(  # type: ignore[no-any-return]
        lambda own, given: _loaded(own, given) if is_sharded(own) else _array(given), state, full, is_leaf=is_sharded
    )


def _array(value: Any) -> Any:
    # Steps outside of jit would compute with arrays of NumPy as NumPy does, which rounds otherwise.
    return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


def _loaded(own: ShardedState, given: Any) -> ShardedState:
    layout, (leaves, definition) = own.layout, jax.tree_util.tree_flatten(own.inner)
    values, structure = jax.tree_util.tree_flatten(given)
    if (definition,) != (structure,):
        raise ValueError(
            f"load_full_state: the state is {structure}, but the optimizer has {definition}. Remedy: load the state of "
            "this optimizer; to restore it with orbax, pass the shapes of jax.eval_shape(tx.init, parameters)"
        )
    pieces = []
    for leaf, value, index in zip(leaves, values, layout.parameters, strict=True):
        shape = jnp.shape(leaf) if index is None else layout.shapes[index]
        if (jnp.shape(value), jnp.result_type(value)) != (shape, jnp.result_type(leaf)):
            raise ValueError(
                f"load_full_state: the state has {jnp.result_type(value)}{list(jnp.shape(value))} where the optimizer "
                f"has {jnp.result_type(leaf)}{list(shape)}: it is of another model or optimizer, or of one rank only"
            )
        pieces.append(_array(value if index is None else layout.piece(index, value)))
    return ShardedState(jax.tree_util.tree_unflatten(definition, pieces), own.part, layout)
