"""The rules of `grad`, `jvp` and `vmap` for the collectives, after `collectives/derivatives.py`.

Operations of a derivative bear the name of the original one and ".tangent" or ".gradient". A group stays a group: every
member takes part, with zeros where nothing depends on it; but not of an allgather. JAX caches traced programs, so every
gradient operation records the setting collective_gradients it was traced with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from horovodish.collectives import derivatives
from horovodish.collectives.reduce_ops import Adasum
from horovodish.jax.primitive import Traced, by_operation, primitive
from horovodish.runtime import basics

_TANGENT, _GRADIENT = ".tangent", ".gradient"


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, traced: tuple[Traced, ...]) -> Any:
    results = primitive.bind(*primals, traced=traced)
    out: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    derived, arguments, places = [], [], []
    begin = 0
    for each, given in by_operation(traced, tangents):
        has = [jnp.issubdtype(primal.dtype, jnp.inexact) for primal in primals[begin : begin + len(given)]]
        varies = [type(tangent) is not ad.Zero for tangent in given]
        if each.operation.kind == "allgather":  # rows of the others may differ by rank, and have no gradient then
            has = varies
        depends = any(varies)
        if depends and each.operation.kind == "barrier":
            out[begin : begin + len(given)] = given
        elif depends:
            derivatives.check_linear(each.operation, "jax.lax.stop_gradient(array)", "derivative")
            derived.append(each.of_members(has).changed(name=each.name + _TANGENT))
            arguments += [ad.instantiate_zeros(tangent) for tangent in derivatives.chosen(given, has)]
            places += [begin + index for index, it in enumerate(has) if it]
        begin += len(given)
    if derived:
        for place, tangent in zip(places, primitive.bind(*arguments, traced=tuple(derived)), strict=True):
            out[place] = tangent
    return results, out


def _transpose(cotangents: Sequence[Any], *primals: Any, traced: tuple[Traced, ...]) -> list[Any]:
    arguments = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    avals = [primal.aval for primal in primals]
    opposites = tuple(_opposite(each, shapes) for each, shapes in by_operation(traced, avals))
    results = primitive.bind(*arguments, traced=opposites)
    return [_finished(each, gradient) for each, given in by_operation(traced, results) for gradient in given]


def _opposite(traced: Traced, shapes: Sequence[Any]) -> Traced:
    """The operation that brings the gradients back, to arrays of these shapes."""
    forward = traced.operation
    back = derivatives.opposite(forward, _factor(traced) if forward.kind in ("allgather", "broadcast") else 1.0)
    if forward.kind == "allgather":  # every rank gave as many rows, and needs no others
        back = back._replace(kind="reducescatter")
    return replace(
        traced,
        operation=back._replace(name=traced.name.removesuffix(_TANGENT) + _GRADIENT),
        rows=tuple(aval.shape[0] for aval in shapes) if back.kind == "allgather" else (),
        horovods_gradients=derivatives.are_horovods(),
    )


def _factor(traced: Traced) -> float:
    """Return what the gradient of a collective of the forward pass is multiplied by."""
    ranks = traced.operation.process_set.size()
    return float(derivatives.factor(traced.operation, ranks, derivatives.are_horovods()))


def _finished(traced: Traced, gradient: Any) -> Any:
    if traced.operation.kind == "broadcast" and basics.rank() != traced.operation.root_rank:
        return jnp.where(False, gradient, 0)  # which depends on it: the program of a second derivative is the root's
    return gradient * _factor(traced) if traced.operation.kind == "reducescatter" else gradient


def _batch(arrays: Sequence[Any], axes: Sequence[Any], *, traced: tuple[Traced, ...]) -> Any:
    moved: list[Any] = []
    moved_axes: list[Any] = []
    for each, given in by_operation(traced, list(zip(arrays, axes, strict=True))):
        if each.operation.ends:
            raise NotImplementedError(
                f'{each.name}: vmap of an optimizer with shard_by="parameter" is not possible. Remedy: call its update '
                "for one model after the other, or leave shard_by= out"
            )
        if each.operation.op is Adasum:
            raise NotImplementedError(
                f"{each.name}: Adasum scales each array as a whole, but vmap combines many arrays into one; use "
                "op=Average"
            )
        for array, axis in given:
            in_rows = each.operation.kind in ("allgather", "alltoall", "reducescatter") and axis is not None
            moved.append(jnp.moveaxis(array, axis, 1) if in_rows else array)
            moved_axes.append(1 if in_rows else axis)
    return primitive.bind(*moved, *arrays[len(moved) :], traced=traced), moved_axes


ad.primitive_jvps[primitive] = _jvp
ad.primitive_transposes[primitive] = _transpose
batching.primitive_batchers[primitive] = _batch
