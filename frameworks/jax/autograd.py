"""What `grad`, `jvp` and `vmap` make of the collectives.

A gradient is that of the sum of the losses of all ranks that take part, so where the forward pass sends values to other
ranks, the backward pass brings their gradients back. Operations of a derivative bear the name of the original one and
".tangent" or ".gradient". A group stays a group: every member takes part, with zeros where nothing depends on it; but
not of an allgather. With the setting collective_gradients=horovod a gradient is multiplied by
`collective_gradients.factor`. JAX caches traced programs, so every gradient operation records the setting it was traced
with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import numpy as jnp
from jax.interpreters import ad, batching

from horovodish.collectives import collective_gradients
from horovodish.collectives.reduce_ops import Adasum, Sum
from horovodish.jax.primitive import Collective, by_collective, primitive
from horovodish.runtime import basics

_TANGENT, _GRADIENT = ".tangent", ".gradient"


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, collectives: tuple[Collective, ...]) -> Any:
    results = primitive.bind(*primals, collectives=collectives)
    out: list[Any] = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    derived, arguments, places = [], [], []
    begin = 0
    for collective, given in by_collective(collectives, tangents):
        has = [jnp.issubdtype(primal.dtype, jnp.inexact) for primal in primals[begin : begin + len(given)]]
        varies = [type(tangent) is not ad.Zero for tangent in given]
        if collective.kind == "allgather":  # rows of the others may differ by rank, and have no gradient then
            has = varies
        depends = any(varies)
        if depends and collective.kind == "barrier":
            out[begin : begin + len(given)] = given
        elif depends:
            _check_linear(collective)
            derived.append(collective.derived(_TANGENT, has))
            arguments += [ad.instantiate_zeros(tangent) for tangent, it in zip(given, has, strict=True) if it]
            places += [begin + index for index, it in enumerate(has) if it]
        begin += len(given)
    if derived:
        for place, tangent in zip(places, primitive.bind(*arguments, collectives=tuple(derived)), strict=True):
            out[place] = tangent
    return results, out


def _check_linear(collective: Collective) -> None:
    if not collective.is_linear:
        raise NotImplementedError(
            f"{collective.name}: {collective.kind} has a derivative for op=Average and op=Sum only, not for "
            f"op={collective.op.name.capitalize()}; pass jax.lax.stop_gradient(array) where none is wanted"
        )


def _transpose(cotangents: Sequence[Any], *primals: Any, collectives: tuple[Collective, ...]) -> list[Any]:
    opposites = [_opposite(collective) for collective in collectives]
    arguments = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    avals = [primal.aval for primal in primals]
    flat = []
    for (collective, given), (_, shapes) in zip(
        by_collective(opposites, arguments), by_collective(collectives, avals), strict=True
    ):
        if collective.kind == "allgather":  # of what a reducescatter has dealt out
            collective = replace(collective, total_rows=tuple(aval.shape[0] for aval in shapes))
        flat.append((collective, given))
    results = primitive.bind(*arguments, collectives=tuple(collective for collective, _ in flat))
    gradients: list[Any] = []
    for collective, given in by_collective(collectives, results):
        gradients += [_finished(collective, gradient) for gradient in given]
    return gradients


def _opposite(collective: Collective) -> Collective:
    """The operation that brings the gradients back."""
    name = collective.name.removesuffix(_TANGENT) + _GRADIENT
    collective = replace(collective, name=name, horovods_gradients=collective_gradients.are_horovods())
    if collective.kind == "allgather":
        return replace(collective, kind="reducescatter", total_rows=(), postscale_factor=_factor(collective))
    if collective.kind == "broadcast":
        return replace(collective, kind="allreduce", root_rank=0, postscale_factor=_factor(collective))
    if collective.kind == "reducescatter":
        return replace(collective, kind="allgather", op=Sum, prescale_factor=1.0, postscale_factor=1.0)
    return collective


def _factor(collective: Collective) -> float:
    """Return what the gradient of a collective of the forward pass is multiplied by."""
    ranks, horovods = collective.process_set.size(), collective_gradients.are_horovods()
    return float(collective_gradients.factor(collective.kind, collective.op, ranks, horovods))


def _finished(collective: Collective, gradient: Any) -> Any:
    if collective.kind == "broadcast" and basics.rank() != collective.root_rank:
        return jnp.where(False, gradient, 0)  # which depends on it: the program of a second derivative is the root's
    if collective.kind == "reducescatter":
        return gradient * (collective.prescale_factor * collective.postscale_factor * _factor(collective))
    return gradient


def _batch(arrays: Sequence[Any], axes: Sequence[Any], *, collectives: tuple[Collective, ...]) -> Any:
    moved: list[Any] = []
    moved_axes: list[Any] = []
    for collective, given in by_collective(collectives, list(zip(arrays, axes, strict=True))):
        if collective.op is Adasum:
            raise NotImplementedError(
                f"{collective.name}: Adasum weighs an array as a whole, and vmap would make one of many; use op=Average"
            )
        for array, axis in given:
            in_rows = collective.kind in ("allgather", "alltoall", "reducescatter") and axis is not None
            moved.append(jnp.moveaxis(array, axis, 1) if in_rows else array)
            moved_axes.append(1 if in_rows else axis)
    return primitive.bind(*moved, collectives=collectives), moved_axes


ad.primitive_jvps[primitive] = _jvp
ad.primitive_transposes[primitive] = _transpose
batching.primitive_batchers[primitive] = _batch
