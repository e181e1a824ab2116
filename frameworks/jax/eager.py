"""The collectives outside of jit: JAX's arrays as memory of the host, handed to the engine like any array."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from horovodish.collectives.array_adapter import ARRAYS
from horovodish.collectives.arrays import Array
from horovodish.collectives.operation import Operation
from horovodish.collectives.process_sets import checked_id
from horovodish.collectives.submission import Handle, generated_name, submit
from horovodish.gradients.shards import own_parts
from horovodish.jax.primitive import Traced, by_operation, primitive, whole

_warned: set[str] = set()
_runs = itertools.count(2**40)  # beyond the numbers of XLA's runs


@primitive.def_impl
def _run(*arrays: Any, traced: tuple[Traced, ...]) -> list[jax.Array]:
    traced = _called(traced)
    handles = [
        _submit(operation, members)
        for operation, (_, members) in zip(whole(traced, next(_runs)), by_operation(traced, arrays), strict=True)
    ]
    return [result for handle in handles for result in handle.wait()[0]]


def exchange(traced: Traced, array: jax.Array, splits: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """An alltoall with splits: the rows that came, and how many from each rank."""
    (operation,) = whole(_called((traced.changed(splits=splits),)))
    (received,), (counts,) = _submit(operation, [array]).wait()
    return received, jnp.asarray(counts)


def _called(traced: tuple[Traced, ...]) -> tuple[Traced, ...]:
    """Counts the call where the user gave no name; its operations have one in common.

    The errors of a codec that has an owner go by the name, so it stays the same in every step.
    """
    owned = {each.name for each in traced if each.operation.codec and each.operation.codec.owner}
    names = {
        each.name: generated_name(each.operation.kind, checked_id(each.operation.process_set))
        for each in {each.name: each for each in traced if each.unnamed and each.name not in owned}.values()
    }
    return tuple(each.changed(name=names.get(each.name, each.name)) for each in traced)


def _submit(operation: Operation, arrays: Sequence[jax.Array]) -> Handle[tuple[list[jax.Array], list[list[int]]]]:
    """Gives a handle of the results and, where the engine allocates them, of how many rows came from each rank."""
    sources = [host_memory(array) for array in arrays]
    if operation.by_elements:
        return _submit_by_elements(operation, sources, [array.sharding for array in arrays])

    def placed(values: list[Array], counts: list[list[int]]) -> tuple[list[jax.Array], list[list[int]]]:
        # A barrier has no results. Of the user's NumPy array, JAX makes one that shares its memory.
        results = values or [np.array(source) for source in sources]
        return jax.device_put(results, [array.sharding for array in arrays]), counts

    members = [] if operation.kind == "barrier" else sources
    return ARRAYS.start(operation, members, placed, waits=len(arrays) == 1)


def _submit_by_elements(
    operation: Operation, sources: list[Array], placements: list[Any]
) -> Handle[tuple[list[jax.Array], list[list[int]]]]:
    """A reducescatter with `ends`. The engine writes only this rank's part of each target."""
    process_set, names = operation.process_set, operation.member_names
    targets = [np.empty(source.size, source.dtype) for source in sources]
    parts = own_parts([source.size for source in sources], process_set.rank(), process_set.size(), operation.ends)
    members = [ARRAYS.member(*each, operation.op) for each in zip(sources, targets, names, strict=True)]

    def placed(_: object) -> tuple[list[jax.Array], list[list[int]]]:
        own = [target[begin:end] for target, (begin, end) in zip(targets, parts, strict=True)]
        return jax.device_put(own, placements), []

    return submit(operation, members, (sources, targets), placed)


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
