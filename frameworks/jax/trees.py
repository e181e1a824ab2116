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

from horovodish.collectives.adapter import checked
from horovodish.collectives.arrays import dtype_code
from horovodish.collectives.operation import Codec, Operation
from horovodish.collectives.reduce_ops import Average, ReduceOp, Sum
from horovodish.errors import UnsupportedTensorError
from horovodish.gradients.compression import Compressor, with_codec
from horovodish.gradients.plan import Payload, backward_buckets
from horovodish.jax.primitive import Traced, run
from horovodish.runtime import basics

_OWN_MODULES = "horovodish."


def coded(traced: Traced, compression: Compressor) -> tuple[Traced, Compressor]:
    """As `with_codec`."""
    operation, compression = with_codec(traced.operation, compression)
    return replace(traced, operation=operation), compression


def named(operation: Operation) -> Traced:
    """An operation by the name that the user has given it, or by its place in the source.

    Raises:
        ValueError: as `name_of`, or the op or the root is none.
    """
    name, unnamed = name_of(operation.kind, operation.name)
    factors = float(operation.prescale_factor), float(operation.postscale_factor)  # which can be hashed
    operation = operation._replace(name=name, prescale_factor=factors[0], postscale_factor=factors[1])
    return Traced(checked(operation), unnamed)


def name_of(what: str, name: str | None) -> tuple[str, bool]:
    """The name of what the user calls so, and whether it is a place in the source because the user gave none.

    Raises:
        ValueError: the name is no text, is empty or has several lines.
    """
    if name is None:
        return f"{what}.{_place_in_source()}", True
    if not isinstance(name, str) or not name or "\n" in name:
        raise ValueError(f"{what}: name={name!r} must be one line of text that is not empty")
    return name, False


def _place_in_source() -> str:
    """The line that calls into this package: the same on every rank, however often a program is traced."""
    frame: Any = sys._getframe()
    while frame.f_globals.get("__name__", "").startswith(_OWN_MODULES) and frame.f_back is not None:
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
    if op is not None and hasattr(value, "todense"):
        raise UnsupportedTensorError(f"{name}: sparse arrays are not reduced; pass array.todense()")
    if _is_complex(value):
        raise UnsupportedTensorError(
            f"{name}: dtype {dtype or 'complex'} is for op=Sum and op=Average of allreduce only; pass array.real and "
            "array.imag, and make jax.lax.complex(real, imag) of what comes back"
        )
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
        untouched: by index in the tree, the leaves that stay: gradients of integers, of dtype float0.
        are_complex: which of the arrays stand for complex ones. Their last dimension has the real and imaginary parts.
    """

    arrays: list[jax.Array]
    suffixes: list[str]
    definition: Any
    untouched: dict[int, Any]
    are_complex: list[bool]

    @staticmethod
    def of(tree: Any, name: str, op: ReduceOp | None, *, takes_complex: bool = False) -> Leaves:
        """Takes a tree apart; what `checked_array` refuses is refused here.

        Args:
            tree: of arrays.
            name: what to call it in an error.
            op: how it is reduced; None when it is only moved.
            takes_complex: reduce complex arrays as their real and imaginary parts, for sums and averages.
        """
        # The indices of a sparse array would be reduced with its values.
        is_leaf = None if op is None else lambda node: hasattr(node, "todense")
        pairs, definition = jax.tree_util.tree_flatten_with_path(tree, is_leaf)
        untouched = {index: leaf for index, (_, leaf) in enumerate(pairs) if _dtype_of(leaf) == jax.dtypes.float0}
        pairs = [pair for index, pair in enumerate(pairs) if index not in untouched]
        suffixes = [jax.tree_util.keystr(path) for path, _ in pairs]
        are_complex = [takes_complex and op in (Average, Sum) and _is_complex(leaf) for _, leaf in pairs]
        arrays = [
            checked_array(jnp.stack([jnp.real(leaf), jnp.imag(leaf)], -1) if split else leaf, name + suffix, op)
            for suffix, split, (_, leaf) in zip(suffixes, are_complex, pairs, strict=True)
        ]
        return Leaves(arrays, suffixes, definition, untouched, are_complex)

    def rebuilt(self, results: Sequence[jax.Array]) -> Any:
        """A tree of the same structure with results in place of the arrays."""
        whole = iter(
            jax.lax.complex(result[..., 0], result[..., 1]) if split else result
            for result, split in zip(results, self.are_complex, strict=True)
        )
        places = range(self.definition.num_leaves)
        return self.definition.unflatten(
            self.untouched[place] if place in self.untouched else next(whole) for place in places
        )

    def in_order_of_layers(self) -> list[int]:
        """The indices of the leaves as a model has its layers, which are numbered."""
        return sorted(range(len(self.arrays)), key=lambda index: _natural(self.suffixes[index]))

    def replaced(self, arrays: Sequence[jax.Array]) -> Leaves:
        """The same places with other arrays."""
        return replace(self, arrays=list(arrays))

    def compressed(self, compression: Compressor) -> tuple[Leaves, list[Any]]:
        """The leaves that travel, and for each the context that `decompressed` needs."""
        pairs = [compression.compress(array) for array in self.arrays]
        return self.replaced([array for array, _ in pairs]), [context for _, context in pairs]


def decompressed(results: Sequence[jax.Array], contexts: Sequence[Any], compression: Compressor) -> list[jax.Array]:
    """The results, decompressed."""
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def on_gpu(arrays: Sequence[Any]) -> bool:
    """Whether a program reduces them on a GPU. Outside of programs, arrays go through host memory."""
    return jax.default_backend() == "gpu" and any(isinstance(array, jax.core.Tracer) for array in arrays)


def run_fused(leaves: Leaves, template: Traced) -> list[jax.Array]:
    """The operation on buckets of leaves."""
    # Ranks must cut a tree in the same places, though what they gather may have more rows on one than on another.
    sizes = [0 if template.operation.kind == "allgather" else array.nbytes for array in leaves.arrays]
    payloads = {index: Payload(sizes[index], leaves.arrays[index].dtype) for index in leaves.in_order_of_layers()}
    buckets = backward_buckets(payloads, basics.running().settings.bucket_mb(on_gpu=on_gpu(leaves.arrays)))
    codec = template.operation.codec
    parts = [
        ([leaves.suffixes[index] for index in bucket], [leaves.arrays[index] for index in bucket], codec)
        for bucket in buckets
    ]
    found = {
        index: array
        for bucket, results in zip(buckets, run_parts(template, parts), strict=True)
        for index, array in zip(bucket, results, strict=True)
    }
    return [found[index] for index in range(len(leaves.arrays))]


def run_parts(
    template: Traced, parts: Sequence[tuple[Sequence[str], Sequence[jax.Array], Codec | None]]
) -> list[list[jax.Array]]:
    """An operation for each part of a tree: suffixes, arrays and codec. All of them are under way at once."""
    traced = [
        # A tree that is one array is the operation itself.
        (template if suffixes == [""] else replace(template, part=f".bucket{number}", members=tuple(suffixes))).changed(
            codec=codec
        )
        for number, (suffixes, _, codec) in enumerate(parts)
    ]
    results = iter(run(traced, [array for _, arrays, _ in parts for array in arrays]))
    return [list(itertools.islice(results, len(arrays))) for _, arrays, _ in parts]


def with_weak_type(array: jax.Array) -> jax.Array:
    """The same values with a weak type, which JAX gives to Python's numbers and to results computed from them."""
    return jnp.full(array.shape, array.dtype.type(0).item()).at[...].set(array)


def _dtype_of(leaf: Any) -> Any:
    return getattr(leaf, "dtype", None)


def _is_complex(leaf: Any) -> bool:
    dtype = _dtype_of(leaf)
    return isinstance(leaf, complex) or (dtype is not None and bool(jnp.issubdtype(dtype, jnp.complexfloating)))


def _natural(path: str) -> list[tuple[int, str]]:
    """A sort key that puts `layer_10` after `layer_9`."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path)]
