"""Trees of arrays: their leaves checked and named, and cut into operations."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax import numpy as jnp

from horovodish import settings
from horovodish.arrays import dtype_code
from horovodish.compression import Compressor, check_compression
from horovodish.errors import UnsupportedTensorError
from horovodish.fusion import plan_buckets
from horovodish.jax.collective import Collective, run
from horovodish.reduce_ops import ReduceOp

_OWN_MODULE = __name__.rpartition(".")[0]


def named(kind: str, name: str | None) -> dict[str, Any]:
    """The fields of a `Collective` that say what the user calls it.

    Raises:
        ValueError: the name is no text, is empty or has several lines.
    """
    if name is None:
        return {"kind": kind, "name": f"{kind}.{_place_in_source()}", "unnamed": True}
    if not isinstance(name, str) or not name or "\n" in name:
        raise ValueError(f"{kind}: name={name!r} must be one line of text that is not empty")
    return {"kind": kind, "name": name, "unnamed": False}


def _place_in_source() -> str:
    """The line that calls into this package: the same on every rank, however often a program is traced."""
    frame: Any = sys._getframe()
    while frame.f_globals.get("__name__", "").startswith(_OWN_MODULE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def checked_array(value: Any, name: str, op: ReduceOp | None) -> jax.Array:
    """`value` as an array that the engine can take.

    Args:
        value: an array of JAX or NumPy, or a number.
        name: what to call it in an error.
        op: how it is reduced; None when it is only moved.

    Raises:
        UnsupportedTensorError: it is none, or of a dtype that the engine does not know or cannot reduce in this way.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended):
        raise UnsupportedTensorError(f"{name}: dtype {dtype} is not supported; pass jax.random.key_data(key)")
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise UnsupportedTensorError(
            f"{name}: expected an array of JAX or NumPy or a number, got {type(value).__name__}"
        ) from error
    dtype_code(array, name, op=op)  # type: ignore[arg-type]
    return array


@dataclass(frozen=True)
class Leaves:
    """The leaves of a tree, as the members of operations.

    Attributes:
        arrays: the leaves.
        suffixes: the path of each within the tree, as `['layer']['weight']`; empty where the tree is one array.
        definition: what makes a tree of leaves.
    """

    arrays: list[jax.Array]
    suffixes: list[str]
    definition: Any

    @staticmethod
    def of(tree: Any, template: Collective, op: ReduceOp | None) -> Leaves:
        """Takes a tree apart; what `checked_array` refuses is refused here."""
        pairs, definition = jax.tree_util.tree_flatten_with_path(tree)
        suffixes = [jax.tree_util.keystr(path) for path, _ in pairs]
        arrays = [
            checked_array(leaf, template.name + suffix, op) for suffix, (_, leaf) in zip(suffixes, pairs, strict=True)
        ]
        return Leaves(arrays, suffixes, definition)

    def replaced(self, arrays: Sequence[jax.Array]) -> Leaves:
        """The same places with other arrays."""
        return replace(self, arrays=list(arrays))

    def compressed(self, compression: Compressor) -> tuple[Leaves, list[Any]]:
        """What travels instead, and what `decompressed` needs besides it.

        Raises:
            ValueError: `compression` is none.
        """
        check_compression(compression)
        pairs = [compression.compress(array) for array in self.arrays]
        return self.replaced([array for array, _ in pairs]), [context for _, context in pairs]


def decompressed(results: Sequence[jax.Array], contexts: Sequence[Any], compression: Compressor) -> list[jax.Array]:
    """What the reduced arrays stand for."""
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def run_fused(leaves: Leaves, template: Collective) -> list[jax.Array]:
    """The operation on buckets of leaves."""
    if leaves.suffixes == [""]:
        return run([template], leaves.arrays)
    buckets = _buckets(leaves, template.kind)
    collectives = [
        replace(template, part=f".bucket{number}", members=tuple(leaves.suffixes[index] for index in bucket))
        for number, bucket in enumerate(buckets)
    ]
    order = [index for bucket in buckets for index in bucket]
    results = dict(zip(order, run(collectives, [leaves.arrays[index] for index in order]), strict=True))
    return [results[index] for index in range(len(leaves.arrays))]


def _buckets(leaves: Leaves, kind: str) -> list[list[int]]:
    """Which leaves travel together, by their indices; the bucket that backward finishes first comes first."""
    # Backward finishes gradients roughly in the opposite order of the layers, and layers are numbered.
    order = sorted(range(len(leaves.arrays)), key=lambda index: _natural(leaves.suffixes[index]), reverse=True)
    # Ranks must cut a tree in the same places, though what they gather may have more rows on one than on another.
    sizes = [0 if kind == "allgather" else array.nbytes for array in leaves.arrays]
    numbers = plan_buckets(
        [sizes[index] for index in order],
        [leaves.arrays[index].dtype for index in order],
        threshold_bytes=_threshold_bytes(),
    )
    buckets: list[list[int]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    for index, number in zip(order, numbers, strict=True):
        buckets[number].append(index)
    return buckets


@functools.cache
def _threshold_bytes() -> int:
    return int(settings.load().fusion_threshold_mb * 2**20)


def _natural(path: str) -> list[tuple[int, str]]:
    """A key by which `layer_10` comes after `layer_9`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path)]
