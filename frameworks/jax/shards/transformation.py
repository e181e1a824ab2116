"""An optimizer that steps this rank's part of the parameters, and gives the updates of all ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import optax
from jax import numpy as jnp

from horovodish.collectives.operation import Operation
from horovodish.collectives.reduce_ops import Adasum
from horovodish.errors import MismatchError
from horovodish.gradients.plan import Payload, backward_buckets
from horovodish.gradients.shard_sets import SameParts
from horovodish.jax.gradients import TreePlan
from horovodish.jax.primitive import Traced, run
from horovodish.jax.shards import by_element, by_parameter
from horovodish.jax.shards.clipping import sharing
from horovodish.jax.shards.layout import Layout
from horovodish.jax.shards.state import ShardedState, begin, checked_layout, is_sharded, refuse_sharded
from horovodish.jax.trees import on_gpu
from horovodish.runtime import basics

__all__ = ["sharded"]


def sharded(tx: optax.GradientTransformationExtraArgs, reduce: TreePlan) -> optax.GradientTransformationExtraArgs:
    """An optimizer that gets reduced gradients, and whose state the ranks share.

    Args:
        tx: works by element, or by parameter, which `init` and the first `update` check.
        reduce: gives this rank its part of the gradients of all ranks.

    Raises:
        ValueError: with `op=Adasum`.
    """
    options, process_set = reduce.options, reduce.options.sharing
    if options.op is Adasum:
        raise ValueError("op=Adasum reduces steps of whole parameters. Remedy: leave shard= out, or use op=Average")
    checked = dict[Any, tuple[Any, list[Any]]]()

    same_parts = SameParts(options.shard_set, options.process_set)

    def init(params: Any) -> Any:
        if options.alone:
            return tx.init(params)
        return begin(tx.init, params, process_set, same_parts(), options.shard_by)

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
        if layout.owners is not None:
            updates, state, params = _without_derivative((updates, state, params))
        with sharing(reduce.name, process_set) as now:
            steps = functools.partial(tx.update, **extra)
            given = updates, state.inner, params
            ways = tuple(map(_way, jax.tree.leaves(extra)))
            key = layout, jax.tree.structure((given, extra)), ways, *map(jnp.result_type, jax.tree.leaves(given))
            if key not in checked:
                checked[key] = _checked(tx.init, steps, given, layout)
            structure, dtypes = checked[key]
            flat = jax.tree.map(lambda leaf: jnp.reshape(leaf, -1), updates)
            if layout.leaves_ranks_out:
                flat, anchor = reduce((flat, jnp.zeros(process_set.size())), params, None, layout.across)
            else:
                flat, anchor = reduce(flat, params, layout.owners, layout.across), None
            elements, definition = jax.tree_util.tree_flatten(flat)
            reduced = [leaf for leaf in [*elements, anchor] if leaf is not None and leaf.size]
            now.follows = [min(reduced, key=lambda leaf: leaf.size)]
            held, whole_structure = jax.tree_util.tree_flatten(state.inner)
            inner = jax.tree_util.tree_unflatten(structure, layout.stepped(held))
            own = None if params is None else layout.pieces(params)
            changes, inner = steps(layout.shaped(elements, definition), inner, own)
        parts = [jnp.zeros(0, dtype) for dtype in dtypes]
        for index, change in zip(layout.own, jax.tree.leaves(changes), strict=True):
            parts[index] = change.reshape(-1)
        inner = jax.tree_util.tree_unflatten(whole_structure, layout.with_others(jax.tree.leaves(inner)))
        return _gathered(parts, definition, layout, reduce, now.follows), ShardedState(inner, state.part, layout)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked(init: Any, steps: Any, given: tuple[Any, Any, Any], layout: Layout) -> tuple[Any, list[Any]]:
    """The structure of the state that the optimizer steps on this rank, and the dtypes of the updates.

    Raises:
        ValueError: ranks cannot share the optimizer's state in this way.
    """
    updates, state, params = given
    parameters = [*range(len(layout.shapes))]
    owners = [*parameters, *layout.parameters]
    inputs = owners if params is None else [*owners, *parameters]
    structure = jax.tree.structure(state)
    if layout.owners is None:
        found = by_element.check(steps, given, inputs, owners, layout)
    else:
        whole = updates, jax.tree_util.tree_unflatten(structure, layout.state), params
        found = by_parameter.check(steps, whole, inputs, owners, layout)
        structure = jax.tree.structure(jax.eval_shape(init, layout.pieces(updates)))
    return structure, [leaf.dtype for leaf in found[: len(parameters)]]


@jax.custom_jvp
def _without_derivative(given: Any) -> Any:
    return given


@_without_derivative.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError(
        'an optimizer with shard_by="parameter" has no derivative: a rank computes the updates of its own parameters '
        "only. Remedy: leave shard_by= out"
    )


def _way(leaf: Any) -> Any:
    """What a program may depend on: a switch or a function itself, and of numbers the shape and dtype."""
    if hasattr(leaf, "dtype"):
        return jnp.shape(leaf), leaf.dtype
    return type(leaf) if isinstance(leaf, float | complex) else (type(leaf), leaf)


def _gathered(
    parts: Sequence[jax.Array], definition: Any, layout: Layout, reduce: TreePlan, follows: Sequence[jax.Array]
) -> Any:
    """The updates of whole parameters, from the parts of all ranks. Collective."""
    sizes = [math.prod(shape) for shape in layout.shapes]
    payloads = {index: Payload(sizes[index] * leaf.dtype.itemsize, leaf.dtype) for index, leaf in enumerate(parts)}
    buckets = backward_buckets(payloads, basics.running().settings.bucket_mb(on_gpu=on_gpu(parts)))
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
    results = dict(zip(order, run(calls, [parts[index] for index in order], follows), strict=True))
    if any(results[index].size != size for index, size in enumerate(sizes)):  # a compiled program fails by itself
        raise MismatchError(
            f"{reduce.name}: a rank has called join(), and its part of the parameters would not be stepped. Remedy: "
            "with shard=, give every rank equally many batches"
        )
    whole = [results[index].reshape(shape) for index, shape in enumerate(layout.shapes)]
    return jax.tree_util.tree_unflatten(definition, whole)
