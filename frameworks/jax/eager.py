"""The collectives outside of jit: JAX's arrays as memory of the host, handed to the engine like any array."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from horovodish import _native
from horovodish.array_submission import checked_splits, scattered_rows
from horovodish.arrays import Array, address, dtype_code
from horovodish.jax.collective import Collective, by_collective, primitive, trees
from horovodish.process_sets import checked_id
from horovodish.submission import Checking, Family, Handle, generated_name, submit

_warned: set[str] = set()
_runs = itertools.count(2**40)  # beyond the numbers of XLA's runs


@primitive.def_impl
def _run(*arrays: Any, collectives: tuple[Collective, ...]) -> list[jax.Array]:
    collectives = _called(collectives)
    run = next(_runs)
    handles = [
        _submit(collective, members, family=Family(tree.name, tree.leaves, tree.structure, run) if tree.name else None)
        for (collective, members), tree in zip(by_collective(collectives, arrays), trees(collectives), strict=True)
    ]
    return [result for handle in handles for result in handle.wait()[0]]


def exchange(collective: Collective, array: jax.Array, splits: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """An alltoall with splits: the rows that came, and how many from each rank."""
    (called,) = _called((collective,))
    (received,), (counts,) = _submit(called, [array], splits).wait()
    return received, jnp.asarray(counts)


def _called(collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Counts the call where the user gave no name; its operations have one in common."""
    names = {
        collective.name: generated_name(collective.kind, checked_id(collective.process_set))
        for collective in {each.name: each for each in collectives if each.unnamed}.values()
    }
    return tuple(replace(each, name=names[each.name]) if each.unnamed else each for each in collectives)


def _submit(
    collective: Collective,
    arrays: Sequence[jax.Array],
    splits: Sequence[int] | None = None,
    family: Family | None = None,
) -> Handle[tuple[list[jax.Array], list[list[int]]]]:
    """Gives a handle of the results and, where the engine allocates them, of how many rows came from each rank."""
    identity = checked_id(collective.process_set)
    name = collective.name
    sources = [host_memory(array) for array in arrays]
    counts: Sequence[int] = ()
    if collective.kind == "alltoall":
        with Checking(collective.kind, name, identity):
            counts = checked_splits(splits, sources[0].shape[0], collective.process_set.size(), name)
    targets = [_target(collective, source) for source in sources]
    described = [
        (address(source), 0 if target is None else address(target), dtype_code(source, name), source.shape)
        for source, target in zip(sources, targets, strict=True)
    ]

    def results(native: _native.Handle) -> tuple[list[jax.Array], list[list[int]]]:
        values = [
            _received(native, index, source) if target is None else target
            for index, (source, target) in enumerate(zip(sources, targets, strict=True))
        ]
        placed = jax.device_put(values, [array.sharding for array in arrays])
        return placed, [native.rows(index) for index, target in enumerate(targets) if target is None]

    return submit(
        collective.kind,
        name + collective.part,
        [] if collective.kind == "barrier" else described,
        keep_alive=(sources, targets),
        result=results,
        op=collective.op,
        prescale_factor=collective.prescale_factor,
        postscale_factor=collective.postscale_factor,
        root_rank=collective.root_rank,
        waits=len(arrays) == 1,
        process_set_id=identity,
        splits=counts,
        member_names=[name + member for member in collective.members],
        family=family,
    )


def host_memory(array: jax.Array) -> Array:
    """The array's values in host memory, and there row-major; shared with the array where that is possible."""
    platform = next(iter(array.devices())).platform
    if platform != "cpu":
        warn_of_staging(platform, "NCCL is used inside of jit only")
    return np.ascontiguousarray(array).reshape(array.shape)


def warn_of_staging(platform: str, why: str) -> None:
    """Says once for each kind of device that its arrays take the way over the host."""
    if platform not in _warned:
        _warned.add(platform)
        warnings.warn(
            f"arrays on {platform} devices are copied to the host, reduced there and copied back: {why}",
            stacklevel=2,
        )


def _target(collective: Collective, source: Array) -> Array | None:
    if collective.kind in ("allgather", "alltoall"):
        return None  # the engine allocates it
    if collective.kind == "barrier":
        return source
    if collective.kind == "reducescatter":
        return np.empty((scattered_rows(source.shape[0], collective.process_set), *source.shape[1:]), source.dtype)
    return np.empty(source.shape, source.dtype)


def _received(native: _native.Handle, index: int, source: Array) -> Array:
    gathered = np.frombuffer(native.output(index), np.uint8).view(source.dtype)
    return gathered.reshape(sum(native.rows(index)), *source.shape[1:])
