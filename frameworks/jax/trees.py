"""Trees of arrays: their leaves checked and named, and cut into operations."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax import numpy as jnp

from horovodish import basics
from horovodish.arrays import dtype_code
from horovodish.compression import Compressor, check_compression
from horovodish.errors import UnsupportedTensorError
from horovodish.gradient_plan import Payload, backward_buckets
from horovodish.jax.primitive import Collective, run
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
    def of(tree: Any, name: str, op: ReduceOp | None) -> Leaves:
        """Takes a tree apart; what `checked_array` refuses is refused here."""
        pairs, definition = jax.tree_util.tree_flatten_with_path(tree)
        suffixes = [jax.tree_util.keystr(path) for path, _ in pairs]
        arrays = [checked_array(leaf, name + suffix, op) for suffix, (_, leaf) in zip(suffixes, pairs, strict=True)]
        return Leaves(arrays, suffixes, definition)

    def in_order_of_layers(self) -> list[int]:
        """The indices of the leaves as a model has its layers, which are numbered."""
        return sorted(range(len(self.arrays)), key=lambda index: _natural(self.suffixes[index]))

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
    # Ranks must cut a tree in the same places, though what they gather may have more rows on one than on another.
    sizes = [0 if template.kind == "allgather" else array.nbytes for array in leaves.arrays]
    payloads = {index: Payload(sizes[index], leaves.arrays[index].dtype) for index in leaves.in_order_of_layers()}
    buckets = backward_buckets(payloads, basics.running().settings.fusion_threshold_mb)
    parts = [
        ([leaves.suffixes[index] for index in bucket], [leaves.arrays[index] for index in bucket]) for bucket in buckets
    ]
    found = {
        index: array
        for bucket, results in zip(buckets, run_parts(template, parts), strict=True)
        for index, array in zip(bucket, results, strict=True)
    }
    return [found[index] for index in range(len(leaves.arrays))]


def run_parts(
    template: Collective, parts: Sequence[tuple[Sequence[str], Sequence[jax.Array]]]
) -> list[list[jax.Array]]:
    """An operation for each part of a tree: suffixes and arrays. All of them are under way at once."""
    collectives = [
        # A tree that is one array is the operation itself.
        template if suffixes == [""] else replace(template, part=f".bucket{number}", members=tuple(suffixes))
        for number, (suffixes, _) in enumerate(parts)
    ]
    results = iter(run(collectives, [array for _, arrays in parts for array in arrays]))
    return [list(itertools.islice(results, len(arrays))) for _, arrays in parts]


def _natural(path: str) -> list[tuple[int, str]]:
    """A key by which `layer_10` comes after `layer_9`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path)]
