"""Compression: what travels instead of a gradient. Each framework's shim says how it casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

__all__ = ["CastCompressor", "Compressor", "NoneCompressor", "check_compression"]


class Compressor(Protocol):
    """What a compression must offer; a class with static methods or an object.

    The reduction is done on what `compress` gives, so sums of it must mean something. For one input dtype and shape
    `compress` must always give the same dtype and shape, on every rank. Both are traced where a framework compiles.
    """

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor that travels, and whatever `decompress` needs besides it."""

    def decompress(self, tensor: Any, context: Any) -> Any:
        """The opposite of `compress`, of the reduced tensor."""


def check_compression(compression: object) -> None:
    """Raise unless this can be used as a compression.

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


class CastCompressor:
    """Tensors of wider floating dtypes travel in one of two bytes. Subclasses of a framework say how.

    Attributes:
        dtype: the smaller one, as the framework knows it.
        is_wider: whether a tensor is of a floating dtype of more than two bytes.
        cast: gives a tensor in a dtype.
    """

    dtype: ClassVar[Any]
    is_wider: ClassVar[Callable[[Any], bool]]
    cast: ClassVar[Callable[[Any, Any], Any]]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """`tensor` in the smaller dtype if it is of a wider floating dtype, and its own dtype."""
        return (cls.cast(tensor, cls.dtype) if cls.is_wider(tensor) else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: Any, context: Any) -> Any:
        """`tensor` in the dtype that it had."""
        return cls.cast(tensor, context)
