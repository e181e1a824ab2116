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
from horovodish.collectives.submission import Handle, generated_name
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
    """Counts the call where the user gave no name; its operations have one in common."""
    names = {
        each.name: generated_name(each.operation.kind, checked_id(each.operation.process_set))
        for each in {each.name: each for each in traced if each.unnamed}.values()
    }
    return tuple(each.changed(name=names[each.name]) if each.unnamed else each for each in traced)


def _submit(operation: Operation, arrays: Sequence[jax.Array]) -> Handle[tuple[list[jax.Array], list[list[int]]]]:
    """Gives a handle of the results and, where the engine allocates them, of how many rows came from each rank."""
    sources = [host_memory(array) for array in arrays]

    def placed(values: list[Array], counts: list[list[int]]) -> tuple[list[jax.Array], list[list[int]]]:
        # A barrier has no results. Of the user's NumPy array, JAX makes one that shares its memory.
        results = values or [np.array(source) for source in sources]
        return jax.device_put(results, [array.sharding for array in arrays]), counts

    members = [] if operation.kind == "barrier" else sources
    return ARRAYS.start(operation, members, placed, waits=len(arrays) == 1)


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
