"""Compression of tensors of every backend: what travels instead of a gradient."""

from __future__ import annotations

from typing import Any

import keras

from horovodish.gradients.compression import casts

__all__ = ["Compression"]


def _is_wider(tensor: Any) -> bool:
    return keras.backend.standardize_dtype(tensor.dtype) in ("float32", "float64")


FP16Compressor, BF16Compressor, Compression = casts(__name__, "float16", "bfloat16", _is_wider, keras.ops.cast)
