"""Compression of arrays: what travels instead of a gradient."""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp

from horovodish.gradients.compression import casts

__all__ = ["Compression"]


def _is_wider(tensor: Any) -> bool:
    return jnp.issubdtype(tensor.dtype, jnp.floating) and tensor.dtype.itemsize > 2


FP16Compressor, BF16Compressor, Compression = casts(__name__, jnp.float16, jnp.bfloat16, _is_wider, jnp.astype)
