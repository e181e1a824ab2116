"""Collectives on arrays of MLX. `horovodish.collectives` documents each function in full.

The engine reads an array after MLX has computed it. So a collective evaluates its arrays, works outside of `mx.compile`
and `mx.vmap` only, and takes place where it is called. `mx.grad` through a collective is collective, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from horovodish import _native
from horovodish.collectives.adapter import Adapter
from horovodish.collectives.arrays import checked_dtype
from horovodish.collectives.devices import Placement
from horovodish.collectives.functions import Collectives, barrier, join
from horovodish.collectives.operation import Member
from horovodish.collectives.recording_adapter import RecordingAdapter
from horovodish.collectives.reduce_ops import ReduceOp
from horovodish.errors import UnsupportedTensorError

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

_CPU = 1  # as DLPack numbers devices


def bytes_of(value: mx.array) -> np.ndarray:
    """The bytes of an array, row-major. Evaluates it, and keeps their memory."""
    return np.asarray(value.reshape(-1).view(mx.uint8))


def with_bytes(data: np.ndarray, dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
    """An array with a copy of such bytes."""
    return mx.array(data).view(dtype).reshape(shape)


def name_of(dtype: mx.Dtype) -> str:
    """Such as "float32"."""
    return str(dtype).removeprefix("mlx.core.")


class _Arrays(Adapter[mx.array]):
    noun = "array"

    def source(self, tensor: Any, name: str) -> mx.array:
        if not isinstance(tensor, mx.array):
            kind = type(tensor).__name__
            raise UnsupportedTensorError(f"{name}: expected an mlx.core.array, got {kind}; pass mx.array(value)")
        if tensor.__dlpack_device__()[0] != _CPU:
            raise UnsupportedTensorError(f"{name}: this MLX is built for GPUs; pip install 'mlx[cpu]'")
        own = mx.contiguous(tensor)  # a second array of this memory: after `x += 1` the object `x` has other memory
        try:
            mx.eval(own)
        except ValueError as error:
            remedy = "call collectives and update() of a wrapped optimizer outside of mx.compile and mx.vmap"
            raise UnsupportedTensorError(f"{name}: an array has no value yet ({error}); {remedy}") from error
        return own

    def target(self, tensor: Any, name: str) -> mx.array:
        raise UnsupportedTensorError(f"{name}: arrays of MLX are values; use the function without _ and its result")

    def empty(self, source: mx.array, shape: Sequence[int] | None) -> mx.array:
        return mx.zeros(source.shape if shape is None else shape, source.dtype)

    def member(self, source: mx.array, target: mx.array | None, name: str, op: ReduceOp | None) -> Member:
        code = checked_dtype(name_of(source.dtype), name, op, self.noun, "array.astype(mlx.core.{})")
        # An array that is asked for its memory is evaluated first. It keeps this memory until it is freed.
        return _native.address(source), 0 if target is None else _native.address(target), code, source.shape

    def received(self, native: _native.Handle, index: int, source: mx.array, rows: int, _: Placement) -> mx.array:
        return with_bytes(np.frombuffer(native.output(index), np.uint8), source.dtype, (rows, *source.shape[1:]))

    def row_counts(self, counts: Sequence[int]) -> mx.array:
        return mx.array(list(counts), mx.int64)


ARRAYS = _Arrays()
"""For what no gradient is computed of."""


class _Recorded(RecordingAdapter[mx.array], _Arrays):
    def has_gradient(self, tensor: mx.array) -> bool:
        return mx.issubdtype(tensor.dtype, mx.floating)

    def recorded(
        self, name: str, inputs: list[mx.array], results: list[mx.array], gradients: Callable[[Any], list[Any]]
    ) -> list[mx.array]:
        function = mx.custom_function(lambda _: results)

        @function.vjp
        def backward(_: object, of_results: list[mx.array], __: object) -> list[mx.array]:
            found = zip(gradients(of_results), inputs, strict=True)
            return [mx.zeros_like(given) if gradient is None else gradient for gradient, given in found]

        @function.jvp
        def forward(*_: object) -> None:
            raise NotImplementedError(f"{name}: collectives of MLX work with mx.grad and mx.vjp, not with mx.jvp")

        outputs: Any = function(inputs)
        return list(outputs)


_COLLECTIVES = Collectives[mx.array, mx.array](_Recorded())
allgather = _COLLECTIVES.allgather
allreduce = _COLLECTIVES.allreduce
alltoall = _COLLECTIVES.alltoall
broadcast = _COLLECTIVES.broadcast
grouped_allgather = _COLLECTIVES.grouped_allgather
grouped_allreduce = _COLLECTIVES.grouped_allreduce
grouped_reducescatter = _COLLECTIVES.grouped_reducescatter
reducescatter = _COLLECTIVES.reducescatter
