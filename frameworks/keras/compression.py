"""Compression: what travels instead of a gradient, on every backend of Keras."""

from __future__ import annotations

from typing import Any, Protocol

import keras


class Compressor(Protocol):
    """What a compression must offer; a class with static methods or an object.

    The reduction is done on what `compress` gives, so sums of it must mean something. For one input dtype and shape
    `compress` must always give the same dtype and shape, on every rank. Both are traced where the backend compiles.
    """

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor that travels, and whatever `decompress` needs besides it."""

    def decompress(self, tensor: Any, context: Any) -> Any:
        """The opposite of `compress`, of the reduced tensor."""


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
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """`tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """`tensor` itself."""
        return tensor


class _CastCompressor:
    dtype: str

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """`tensor` in the smaller dtype if it is float32 or float64, and its own dtype."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return (keras.ops.cast(tensor, cls.dtype) if dtype in ("float32", "float64") else tensor), dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """`tensor` in the dtype that it had."""
        return keras.ops.cast(tensor, context)


class FP16Compressor(_CastCompressor):
    """float32 and float64 travel as float16: half the bytes, 11 bits of precision, values up to 65504."""

    dtype = "float16"


class BF16Compressor(_CastCompressor):
    """float32 and float64 travel as bfloat16: half the bytes, 8 bits of precision, the range of float32."""

    dtype = "bfloat16"


class Compression:
    """The compressions to choose from. Any class with `compress` and `decompress` will do as well; see `Compressor`.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
