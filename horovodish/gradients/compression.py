"""Compression: what travels instead of a gradient. Each framework's shim says how it casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from horovodish.collectives.codecs import CodecCompressor, Compression, check_called
from horovodish.collectives.operation import Operation
from horovodish.gradients.powersgd import powersgd

__all__ = ["CastCompressor", "Compressions", "Compressor", "NoneCompressor", "casts", "check_compression", "with_codec"]


class Compressor(Protocol):
    """The interface of a compression: a class with static methods, or an object.

    The reduction is done on what `compress` gives, so sums of it must mean something. For one input dtype and shape
    `compress` must always give the same dtype and shape, on every rank. Both are traced where a framework compiles.
    """

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor that travels, and whatever `decompress` needs besides it."""

    def decompress(self, tensor: Any, context: Any) -> Any:
        """The opposite of `compress`, of the reduced tensor."""


def check_compression(compression: Compressor) -> Compressor:
    """Return a compression. Raise unless it can be used as one.

    Raises:
        ValueError: it has no `compress` or no `decompress`, or it is a function.
    """
    check_called(compression)
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"compression={compression!r} is not a compression; use Compression.none, .fp16, .bf16, .int8, or a class "
            "with compress and decompress"
        )
    return compression


def with_codec(operation: Operation, compression: Compressor) -> tuple[Operation, Compressor]:
    """A checked operation that has the codec if `compression` is one, and the compression that is left to do.

    Raises:
        ValueError: `compression` is none, or a codec that the operation cannot have.
    """
    check_compression(compression)
    if isinstance(compression, CodecCompressor):
        return compression.applied(operation), NoneCompressor
    return operation, compression


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
    """Tensors of wider floating dtypes travel in a dtype of two bytes. `casts` makes the subclasses of a framework.

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


class Compressions(Compression):
    """The compressions to choose from. Any class with `compress` and `decompress` will do as well; see `Compressor`.

    `none` sends tensors as they are. `fp16` sends float32 and float64 as float16: 11 bits of precision, values up to
    65504. `bf16` sends them as bfloat16: 8 bits of precision, the range of float32.

    `int8`, `int4`, `onebit`, `ternary`, `topk(share)` and `randomk(share)` are codecs, for links between hosts that are
    slower than the training. See `horovodish.Compression` for what they do and for their options.

    `powersgd(rank)` sends large matrices as two thin factors, also within a host. It is for `DistributedOptimizer` of
    PyTorch and JAX, with the options of a codec.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.bf16)
    """

    none: ClassVar[type[NoneCompressor]] = NoneCompressor
    fp16: ClassVar[type[CastCompressor]]
    bf16: ClassVar[type[CastCompressor]]
    powersgd = staticmethod(powersgd)


def casts(
    module: str, fp16: Any, bf16: Any, is_wider: Callable[[Any], bool], cast: Callable[[Any, Any], Any]
) -> tuple[type[CastCompressor], type[CastCompressor], type[Compressions]]:
    """Return the classes `FP16Compressor`, `BF16Compressor` and `Compression` of a framework.

    Args:
        module: that they belong to, where pickle looks for them.
        fp16, bf16: the two dtypes, as the framework knows them.
        is_wider: whether a tensor is of a floating dtype of more than two bytes.
        cast: gives a tensor in a dtype.
    """
    how = {"is_wider": staticmethod(is_wider), "cast": staticmethod(cast), "__module__": module}
    to_fp16 = type("FP16Compressor", (CastCompressor,), {**how, "dtype": fp16})
    to_bf16 = type("BF16Compressor", (CastCompressor,), {**how, "dtype": bf16})
    members = {"fp16": to_fp16, "bf16": to_bf16, "__module__": module, "__doc__": Compressions.__doc__}
    return to_fp16, to_bf16, type("Compression", (Compressions,), members)
