"""Compression of tensors: what travels instead of a gradient."""

from __future__ import annotations

import torch

from horovodish.gradients.compression import CastCompressor, NoneCompressor
from horovodish.gradients.compression import Compressor as Compressor  # Horovod's users import it from here

__all__ = ["Compression"]


def _is_wider(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 2


class FP16Compressor(CastCompressor):
    """float32 and float64 travel as float16: 11 bits of precision, values up to 65504."""

    dtype, is_wider, cast = torch.float16, _is_wider, torch.Tensor.to


class BF16Compressor(CastCompressor):
    """float32 and float64 travel as bfloat16: 8 bits of precision, the range of float32."""

    dtype, is_wider, cast = torch.bfloat16, _is_wider, torch.Tensor.to


class Compression:
    """The compressions to choose from. Any class with `compress` and `decompress` will do as well; see `Compressor`.

    `none` sends tensors as they are; `fp16` and `bf16` send float32 and float64 in half the bytes or fewer, as float16
    or bfloat16.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
