"""Compression of tensors: what travels instead of a gradient."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovodish.gradients.compression import CastCompressor, NoneCompressor
from horovodish.gradients.compression import Compressor as Compressor  # Horovod's users import it from here

__all__ = ["Compression"]


def _is_wider(tensor: Any) -> bool:
    return tensor.dtype.is_floating and tensor.dtype.size > 2


class FP16Compressor(CastCompressor):
    """float32 and float64 travel as float16: 11 bits of precision, values up to 65504."""

    dtype, is_wider, cast = tf.float16, _is_wider, tf.cast


class BF16Compressor(CastCompressor):
    """float32 and float64 travel as bfloat16: 8 bits of precision, the range of float32."""

    dtype, is_wider, cast = tf.bfloat16, _is_wider, tf.cast


class Compression:
    """The compressions to choose from. Any class with `compress` and `decompress` will do as well; see `Compressor`.

    `none` sends tensors as they are; `fp16` and `bf16` send float32 and float64 in half the bytes or fewer, as float16
    or bfloat16.

    Example:
        >>> tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
