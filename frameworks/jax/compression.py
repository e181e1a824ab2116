"""Compression: what travels instead of a gradient."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax import numpy as jnp


class Compressor(Protocol):
    """What a compression must offer; a class with static methods or an object. Both functions are traced by jit.

    The reduction is done on what `compress` gives, so sums of it must mean something. For one input dtype and shape
    `compress` must always give the same dtype and shape, on every rank.
    """

    def compress(self, array: jax.Array) -> tuple[jax.Array, Any]:
        """The array that travels, and whatever `decompress` needs besides it."""

    def decompress(self, array: jax.Array, context: Any) -> jax.Array:
        """The opposite of `compress`, of the reduced array."""


def check_compression(compression: object) -> None:
    """Passes what can be used as a compression.

    Raises:
        ValueError: it has no `compress` or no `decompress`.
    """
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"compression={compression!r} is none; use Compression.none, .fp16, .bf16, or a class with compress and "
            "decompress"
        )


class NoneCompressor:
    """Arrays travel as they are."""

    @staticmethod
    def compress(array: jax.Array) -> tuple[jax.Array, Any]:
        """`array` itself."""
        return array, None

    @staticmethod
    def decompress(array: jax.Array, context: Any) -> jax.Array:
        """`array` itself."""
        return array


class _CastCompressor:
    dtype: Any

    @classmethod
    def compress(cls, array: jax.Array) -> tuple[jax.Array, Any]:
        """`array` in the smaller dtype if it is of a wider floating dtype, and its own dtype."""
        wider = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > jnp.dtype(cls.dtype).itemsize
        return (array.astype(cls.dtype) if wider else array), array.dtype

    @staticmethod
    def decompress(array: jax.Array, context: Any) -> jax.Array:
        """`array` in the dtype that it had."""
        return array.astype(context)


class FP16Compressor(_CastCompressor):
    """float32 and float64 travel as float16: half the bytes, 11 bits of precision, values up to 65504."""

    dtype = jnp.float16


class BF16Compressor(_CastCompressor):
    """float32 and float64 travel as bfloat16: half the bytes, 8 bits of precision, the range of float32."""

    dtype = jnp.bfloat16


class Compression:
    """The compressions to choose from. Any class with `compress` and `decompress` will do as well; see `Compressor`.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optax.sgd(0.1), compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
