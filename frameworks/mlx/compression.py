"""Compression of arrays: what travels instead of a gradient."""

import mlx.core as mx

from horovodish.gradients.compression import casts

__all__ = ["Compression"]


def _is_wider(tensor: mx.array) -> bool:
    return mx.issubdtype(tensor.dtype, mx.floating) and tensor.dtype.size > 2


FP16Compressor, BF16Compressor, Compression = casts(
    __name__, mx.float16, mx.bfloat16, _is_wider, lambda tensor, dtype: tensor.astype(dtype)
)
