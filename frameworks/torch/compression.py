"""Compression of tensors: what travels instead of a gradient."""

from __future__ import annotations

from typing import Any

import torch

from horovodish.compression import CastCompressor, NoneCompressor


class _Cast(CastCompressor):
    @classmethod
    def is_wider(cls, tensor: Any) -> bool:
        return bool(tensor.is_floating_point()) and tensor.element_size() > cls.dtype.itemsize

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(dtype)


class FP16Compressor(_Cast):
    """float32 and float64 travel as float16: half the bytes, 11 bits of precision, values up to 65504."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """float32 and float64 travel as bfloat16: half the bytes, 8 bits of precision, the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """The compressions to choose from. Any class with `compress` and `decompress` will do as well; see `Compressor`.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
