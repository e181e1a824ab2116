"""Compression of tensors of every backend: what travels instead of a gradient."""

from __future__ import annotations

from typing import Any

import keras

from horovodish.compression import CastCompressor, NoneCompressor


class _Cast(CastCompressor):
    @classmethod
    def is_wider(cls, tensor: Any) -> bool:
        return keras.backend.standardize_dtype(tensor.dtype) in ("float32", "float64")

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return keras.ops.cast(tensor, dtype)


class FP16Compressor(_Cast):
    """float32 and float64 travel as float16: half the bytes, 11 bits of precision, values up to 65504."""

    dtype = "float16"


class BF16Compressor(_Cast):
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
