"""The state of an optimizer that ranks share: which part a rank has, and the whole state of the plain optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from horovodish.collectives.adapter import checked_root
from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.functions import barrier
from horovodish.collectives.objects import allgather_object
from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.submission import Handle
from horovodish.collectives.transfers import receive, send
from horovodish.errors import UnsupportedTensorError
from horovodish.jax.eager import host_memory
from horovodish.jax.shards import by_element, by_parameter
from horovodish.jax.shards.layout import Layout
from horovodish.runtime import basics

__all__ = ["full_state", "load_full_state"]

Tree = TypeVar("Tree")

_MARK = 1 << 20


@dataclass(frozen=True)
class ShardedState:
    """The state of an optimizer with `shard=`, on one rank.

    Attributes:
        inner: the state of the wrapped optimizer for this rank's part of the parameters. What belongs to whole
            parameters of other ranks has no elements here.
        part: two arrays of zeros. Their lengths say which part this is, also in files that have shapes only.
        layout: what the part is made of.
    """

    inner: Any
    part: tuple[jax.Array, jax.Array]
    layout: Layout

    @property
    def place(self) -> tuple[int, int]:
        """The number of the rank among those that share, and how many they are."""
        return self.part[0].shape[-1] - 1, self.part[1].shape[-1]

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


def begin(
    init: Callable[[Any], Any], params: Any, process_set: ProcessSet, across: ProcessSet | None, shard_by: str
) -> ShardedState:
    """The state of an optimizer for this rank's part of parameters.

    Args:
        process_set: the ranks that share.
        across: those that have the same part; None: there are no others.

    Raises:
        ValueError: the optimizer is not one that works by element, or by parameter.
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
    if shard_by == "parameter":
        belonging = by_parameter.parameters_of(init, params)
        layout = Layout(tuple(paths), shapes, *belonging, process_set, across).by_parameter()
        by_parameter.check_parts(init, params, layout)
        by_parameter.check(init, [params], range(len(leaves)), layout.parameters, layout)
        own = jax.tree.leaves(init(layout.pieces(params)))
        structure = jax.tree.structure(jax.eval_shape(init, params))
        return _part_of(jax.tree_util.tree_unflatten(structure, layout.with_others(own)), layout)
    # State has a number for each element of a parameter where it has the parameter's shape. Here no two are equal.
    marks = {(_MARK + index, *[1] * (len(shape) - 1)): index for index, shape in enumerate(shapes)}
    marked = [jax.ShapeDtypeStruct(mark, jnp.result_type(leaf)) for mark, leaf in zip(marks, leaves, strict=True)]
    state = jax.tree.leaves(jax.eval_shape(init, jax.tree_util.tree_unflatten(definition, marked)))
    parameters = tuple(marks.get(leaf.shape) for leaf in state)
    layout = Layout(tuple(paths), shapes, parameters, _leaves_of(init, params), process_set, across)
    by_element.check(init, [params], range(len(leaves)), parameters, layout)
    return _part_of(init(layout.pieces(params)), layout)


def _leaves_of(init: Callable[[Any], Any], params: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    leaves = jax.tree.leaves(jax.eval_shape(init, params))
    return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)


def _part_of(inner: Any, layout: Layout) -> ShardedState:
    rank, ranks = layout.process_set.rank(), layout.process_set.size()
    return ShardedState(inner, (jnp.zeros(rank + 1, bool), jnp.zeros(ranks, bool)), layout)


def shared_anew(full: Any, layout: Layout) -> ShardedState:
    """This rank's part of the full state of an optimizer, as the ranks that there are now share it. Not collective.

    Args:
        full: the state of the plain optimizer; the part has memory of its own.
        layout: as other ranks have shared it.
    """
    layout = layout if layout.owners is None else layout.by_parameter()
    leaves, definition = jax.tree_util.tree_flatten(full)
    pieces = [
        leaf if index is None else jnp.array(layout.part(place, leaf))
        for place, (leaf, index) in enumerate(zip(leaves, layout.parameters, strict=True))
    ]
    return _part_of(jax.tree_util.tree_unflatten(definition, pieces), layout)


def checked_layout(state: Any, process_set: ProcessSet, function: str = "update") -> Layout:
    """The layout of a state that belongs to this rank. Messages name the function that has got the state.

    Raises:
        ValueError: it is the state of another rank, of another number of ranks, of several models, or of an optimizer
            without shards.
    """
    load = "state = hvd.load_full_state(optimizer.init(parameters), full)"
    if not isinstance(state, ShardedState):
        raise ValueError(f"{function}() of an optimizer with shard= got the state of a plain one. Remedy: {load}")
    if state.part[0].ndim > 1:
        raise ValueError(
            f"{function}() got the state of several models, as jax.vmap of init() makes it. Remedy: call it for one "
            "model after the other, with jax.tree.map(lambda leaf: leaf[number], state)"
        )
    own = process_set.rank(), process_set.size()
    if state.place != own:
        raise ValueError(
            "{}() got the part of rank {} of {} of a sharded optimizer's state, but this is rank {} of {}. Remedy: "
            "save what hvd.full_state(state) gives; any number of ranks take it by {}".format(
                function, *state.place, *own, load
            )
        )
    return state.layout


def full_state(state: Tree, root: int = 0) -> Tree | None:
    """The state of the plain optimizer, collected from the ranks' parts. Collective; blocks; outside of jit.

    The other ranks send their parts to the root, array by array, and need no memory for the whole.

    Args:
        state: the state of an optimizer, or a tree that has it, such as `(parameters, state, epoch)`.
        root: which rank gets it.

    Returns:
        On the root a tree with the state that the optimizer without `shard=` would have, with arrays of NumPy where
        arrays were shared out; None on the other ranks. Nothing else changes. A tree without shared state is returned
        unchanged.

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
    if layout.across is not None and root in range(basics.size()) and root not in process_set.ranks:
        return state  # another set has the same
    checked_root(root, process_set)
    leaves, definition = jax.tree_util.tree_flatten(state.inner)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ValueError("full_state works outside of jit only. Remedy: return the state from the program")
    checked_layout(state, process_set, "full_state")
    shared = [(place, index) for place, index in enumerate(layout.parameters) if index is not None]
    told = allgather_object([np.dtype(leaves[place].dtype) for place, _ in shared], process_set=process_set)
    for number, (place, index) in enumerate(shared):
        shape = layout.state[place].shape
        cuts = layout.cuts(shape, index)
        holder = next((rank for rank, end in enumerate(cuts) if end > 0), 0)
        if basics.rank() == root:
            leaves[place] = _collected(leaves[place], np.empty(shape, told[holder][number]), cuts, process_set)
        elif leaves[place].size > 0:
            send(ARRAYS, host_memory(leaves[place]), root, process_set=process_set).wait()
    barrier(process_set)  # none ends while others wait
    return jax.tree_util.tree_unflatten(definition, leaves)


def _collected(own: jax.Array, whole: np.ndarray, cuts: Sequence[int], process_set: ProcessSet) -> np.ndarray:
    """The parts of all ranks in one array, on the root."""
    flat, begin, waiting = whole.reshape(-1), 0, list[Handle[int]]()
    for rank, end in zip(process_set.ranks, cuts, strict=True):
        if rank == basics.rank():
            flat[begin:end] = np.asarray(own).reshape(-1)
        elif end > begin:
            waiting.append(receive(ARRAYS, flat[begin:end], rank, process_set=process_set))
        begin = end
    for handle in waiting:
        handle.wait()
    return whole


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
    for place, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
        own_type, type_given, shape = jnp.result_type(leaf), jnp.result_type(value), layout.state[place].shape
        # Some optimizers turn state of bfloat16 parameters into float32 in their first step.
        are_alike = own_type == type_given or all(jnp.issubdtype(each, jnp.floating) for each in (own_type, type_given))
        if jnp.shape(value) != shape or not are_alike:
            raise ValueError(
                f"load_full_state: the state has {type_given}{list(jnp.shape(value))} where the optimizer has "
                f"{own_type}{list(shape)}: it is of another model or optimizer, or of one rank only. Remedy: load what "
                "hvd.full_state gave for this model and optimizer"
            )
        pieces.append(_array(layout.part(place, value)))
    return ShardedState(jax.tree_util.tree_unflatten(definition, pieces), own.part, layout)
