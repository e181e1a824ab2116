"""An optimizer that steps this rank's pieces of the parameters, and gives the updates of all ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import optax
from jax import numpy as jnp

from horovodish.collectives.operation import Operation
from horovodish.collectives.reduce_ops import Adasum
from horovodish.errors import MismatchError
from horovodish.gradients.plan import Payload, backward_buckets
from horovodish.jax.gradients import TreePlan
from horovodish.jax.primitive import Traced, run
from horovodish.jax.shards.by_element import check
from horovodish.jax.shards.clipping import sharing
from horovodish.jax.shards.layout import Layout
from horovodish.jax.shards.state import ShardedState, begin, checked_layout, is_sharded, refuse_sharded
from horovodish.runtime import basics

__all__ = ["sharded"]


def sharded(tx: optax.GradientTransformationExtraArgs, reduce: TreePlan) -> optax.GradientTransformationExtraArgs:
    """An optimizer that gets reduced gradients, and whose state the ranks share.

    Args:
        tx: works element by element, which `init` and the first `update` check.
        reduce: gives this rank its elements of the gradients of all ranks.

    Raises:
        ValueError: with `op=Adasum`.
    """
    options, process_set = reduce.options, reduce.options.process_set
    if options.op is Adasum:
        raise ValueError("op=Adasum reduces steps of whole parameters. Remedy: leave shard= out, or use op=Average")
    checked = set[Any]()

    def init(params: Any) -> Any:
        return tx.init(params) if options.alone else begin(tx.init, params, process_set)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # After losses in an elastic job, a rank that is left alone has a part that is the whole.
        if options.alone and not (is_sharded(state) and process_set.included()):
            refuse_sharded(state, "update() on a rank that shares with nobody", "load what hvd.full_state had given")
            return tx.update(updates, state, params, **extra)  # type: ignore[no-any-return]
        layout = checked_layout(state, process_set)
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(updates)]
        if shapes != list(layout.shapes):
            raise ValueError(
                f"update() got gradients of the shapes {shapes}, but init() got parameters of the shapes "
                f"{list(layout.shapes)}. Remedy: give both the same tree; with shard= a gradient cannot be None"
            )
        with sharing(reduce.name, process_set):
            given, owners = (updates, state.inner, params), [*range(len(shapes)), *layout.parameters]
            ways = tuple(map(_way, jax.tree.leaves(extra)))
            key = layout, jax.tree.structure((given, extra)), ways, *map(jnp.result_type, jax.tree.leaves(given))
            if key not in checked:
                inputs = owners if params is None else [*owners, *range(len(shapes))]
                check(functools.partial(tx.update, **extra), given, inputs, owners, layout)
                checked.add(key)
            flat = reduce(jax.tree.map(lambda leaf: jnp.reshape(leaf, -1), updates), params)
            leaves, definition = jax.tree_util.tree_flatten(flat)
            pieces = [leaf.reshape(shape) for leaf, shape in zip(leaves, layout.piece_shapes, strict=True)]
            own = None if params is None else layout.pieces(params)
            changes, inner = tx.update(jax.tree_util.tree_unflatten(definition, pieces), state.inner, own, **extra)
        return _gathered(changes, layout, reduce), ShardedState(inner, state.part, layout)

    return optax.GradientTransformationExtraArgs(init, update)


def _way(leaf: Any) -> Any:
    """What a program may depend on: a switch or a function itself, and of numbers the shape and dtype."""
    if hasattr(leaf, "dtype"):
        return jnp.shape(leaf), leaf.dtype
    return type(leaf) if isinstance(leaf, float | complex) else (type(leaf), leaf)


def _gathered(changes: Any, layout: Layout, reduce: TreePlan) -> Any:
    """The updates of whole parameters, from the pieces of all ranks. Collective."""
    leaves, definition = jax.tree_util.tree_flatten(changes)
    sizes = [math.prod(shape) for shape in layout.shapes]
    payloads = {index: Payload(sizes[index] * leaf.dtype.itemsize, leaf.dtype) for index, leaf in enumerate(leaves)}
    buckets = backward_buckets(payloads, basics.running().settings.fusion_threshold_mb)
    operation = Operation("allgather", f"{reduce.name}.updates", layout.process_set)
    calls = [
        Traced(
            operation,
            reduce.unnamed,
            f".bucket{number}",
            tuple(layout.paths[index] for index in bucket),
            tuple(sizes[index] for index in bucket),
        )
        for number, bucket in enumerate(buckets)
    ]
    order = [index for bucket in buckets for index in bucket]
    results = dict(zip(order, run(calls, [leaves[index].reshape(-1) for index in order]), strict=True))
    if any(results[index].size != size for index, size in enumerate(sizes)):  # a compiled program fails by itself
        raise MismatchError(
            f"{reduce.name}: a rank has called join(), and its part of the parameters would not be stepped. Remedy: "
            "with shard=, give every rank equally many batches"
        )
    whole = [results[index].reshape(shape) for index, shape in enumerate(layout.shapes)]
    return jax.tree_util.tree_unflatten(definition, whole)
