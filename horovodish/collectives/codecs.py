"""Codecs: what travels between hosts instead of values, where the link is slow. The engine encodes and decodes.

A cast changes a tensor before the engine gets it. A codec is a part of the operation, because sums of codes mean
nothing: the engine decodes what comes from other hosts, adds, and encodes the sum.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, SupportsFloat, SupportsIndex

import numpy as np

from horovodish import _native
from horovodish.collectives.operation import Codec, Operation
from horovodish.collectives.reduce_ops import Average, ReduceOp, Sum

__all__ = ["Compression"]

Where = Callable[[str, tuple[int, ...]], bool]

LEAST_ELEMENTS = 65536
"""An optimizer sends tensors of fewer elements as they are: they are a small part of a model, and often the one that
needs precision."""


MOST_STEPS = 2**63 - 1
"""The engine counts steps in 64 bits."""


def _is_large_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and math.prod(shape) >= LEAST_ELEMENTS


@dataclass(frozen=True)
class CodecCompressor:
    """A codec and its options. Call it to get the same codec with other options.

    Attributes:
        kind: a key of `_native.CODECS`.
        share: the fraction of the values that travel, for `topk` and `randomk`.
        error_feedback: an optimizer adds the encoding error to the tensor's next gradient.
        start: how many steps an optimizer sends a tensor unencoded before the first step that encodes it.
        where: which tensors of an optimizer are encoded, by the parameter's name and shape. None: tensors of at least
            two dimensions and 65536 elements.
    """

    kind: str
    share: float = 0.0
    error_feedback: bool = True
    start: int = 0
    where: Where | None = None

    def __post_init__(self) -> None:
        if self.kind in ("topk", "randomk") and not (isinstance(self.share, SupportsFloat) and 0 < self.share <= 1):
            raise ValueError(
                f"Compression.{self.kind}({self.share!r}): the share must be a number above 0 and at most 1"
            )
        if not isinstance(self.error_feedback, (bool, np.bool_)):
            raise ValueError(f"error_feedback={self.error_feedback!r} must be True or False")
        is_number = isinstance(self.start, SupportsIndex) and not isinstance(self.start, bool)
        if not (is_number and 0 <= self.start <= MOST_STEPS):
            raise ValueError(f"start={self.start!r} must be a whole number from 0 to 2**63 - 1")
        if self.where is not None and not callable(self.where):
            raise ValueError(f"where={self.where!r} must be a function of a parameter's name and shape")

    def __call__(self, *, error_feedback: bool = True, start: int = 0, where: Where | None = None) -> CodecCompressor:
        """The same codec with these options."""
        return replace(self, error_feedback=error_feedback, start=start, where=where)

    def __repr__(self) -> str:
        return f"Compression.{self.kind}" + (f"({self.share})" if self.share else "")

    def chooses(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the gradient of a parameter is encoded.

        Raises:
            ValueError: `where` has raised an exception.
        """
        try:
            return bool((self.where or _is_large_matrix)(name, shape))
        except Exception as error:
            raise ValueError(
                f"compression={self!r}: where= raised {type(error).__name__} for parameter {name!r} of shape {shape}: "
                f"{error}"
            ) from error

    def of(self, name: str, shape: tuple[int, ...], owner: str = "") -> Codec | None:
        """How the gradient of a parameter travels; None: the ranks have nothing to compare of it.

        Args:
            name, shape: of the parameter.
            owner: of the parameter, where another one may have its name.
        """
        code, start = _native.CODECS[self.kind], operator.index(self.start)
        return Codec(code, self.share, bool(self.error_feedback), start, owner, self.chooses(name, shape))

    def check_op(self, op: ReduceOp | None) -> None:
        """Raise ValueError unless this codec works with reductions by `op`."""
        if op not in (Average, Sum):
            raise ValueError(f"compression={self!r} needs op=Average or op=Sum: only sums can be encoded")

    def applied(self, operation: Operation) -> Operation:
        """A checked operation whose tensors are encoded, whatever their sizes. No errors are kept for the next one.

        Raises:
            ValueError: only an optimizer can do this.
        """
        if operation.kind != "allreduce":
            raise ValueError(f"compression={self!r} is for allreduce, not for {operation.kind}; use Compression.none")
        self.check_op(operation.op)
        if self.start or self.where is not None:
            raise ValueError(f"compression={self!r}: start= and where= are for DistributedOptimizer; leave them out")
        if self.kind == "auto":
            raise ValueError(f"compression={self!r} is for DistributedOptimizer; use Compression.int8 or no codec here")
        return operation._replace(codec=Codec(_native.CODECS[self.kind], self.share, False, 0))

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Raise ValueError: the engine encodes, and only while it reduces."""
        raise ValueError(
            f"{self!r} cannot compress a tensor by itself; pass it to allreduce or DistributedOptimizer, or use "
            "Compression.fp16 or .bf16 here"
        )

    def decompress(self, tensor: Any, context: Any) -> Any:
        """As `compress`."""
        return self.compress(tensor)


def check_called(compression: Any) -> None:
    """Raise ValueError if this is a function, such as one that makes a codec."""
    if inspect.isroutine(compression):
        name = compression.__name__.removeprefix("_")
        raise ValueError(
            f"compression= is the function {name}. Remedy: call it and pass what it returns, as in "
            "Compression.topk(0.01) or Compression.powersgd(2)"
        )


def checked_codec(compression: Any) -> CodecCompressor:
    """Return a codec. Raise ValueError unless it is one."""
    check_called(compression)
    if not isinstance(compression, CodecCompressor):
        raise ValueError(
            f"compression={compression!r} is not a codec. Remedy: use Compression.int8 or another codec here, or cast "
            "the tensor and leave compression= out"
        )
    return compression


def _topk(share: float, *, error_feedback: bool = True, start: int = 0, where: Where | None = None) -> CodecCompressor:
    return CodecCompressor("topk", share, error_feedback, start, where)


def _randomk(
    share: float, *, error_feedback: bool = True, start: int = 0, where: Where | None = None
) -> CodecCompressor:
    return CodecCompressor("randomk", share, error_feedback, start, where)


class Compression:
    """The codecs: they make what travels between hosts 4 to 100 times shorter. Within a host nothing is encoded.

    `int8` sends a byte for each value, and a scale for each 256. `int4` sends half a byte, and a scale for each 64.
    `ternary` sends -1, 0 or 1, and `onebit` a sign, each with a scale for 1024 or 4096 values. `topk(share)` sends the
    largest values of each 4096, and `randomk(share)` some that are drawn anew each time; the others count as 0.

    `auto`, for optimizers, is `int8` or no codec. Before the first tensor that it may encode, the ranks reduce 8 MiB of
    test values between hosts both ways. They use `int8` if it takes at most 80 % of the time. Rank 0 prints the choice
    and the setting that repeats the run bit by bit. Where NCCL reduces the gradients of GPUs, `auto` means no codec.

    Floating-point tensors of every dtype are encoded from float32, and decoded to float32. Integers travel as they are.
    If a value of a block is NaN or infinite, the whole block of the result is NaN. Every rank gets the same bits.

    In an optimizer each codec takes options, as in `int8(start=100)`. With `error_feedback=False` the encoding error is
    dropped instead of added to the tensor's next gradient. In the first `start` steps tensors travel unencoded.
    `where(name, shape)` selects the tensors to encode; by default all of at least two dimensions and 65536 elements.
    """

    auto: ClassVar[CodecCompressor] = CodecCompressor("auto")
    int8: ClassVar[CodecCompressor] = CodecCompressor("int8")
    int4: ClassVar[CodecCompressor] = CodecCompressor("int4")
    onebit: ClassVar[CodecCompressor] = CodecCompressor("onebit")
    ternary: ClassVar[CodecCompressor] = CodecCompressor("ternary")
    topk = staticmethod(_topk)
    randomk = staticmethod(_randomk)
