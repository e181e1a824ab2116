"""Compression of tensors: what travels instead of a gradient."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovodish.gradients.compression import Compressor as Compressor  # Horovod's users import it from here
from horovodish.gradients.compression import NoneCompressor as NoneCompressor
from horovodish.gradients.compression import casts

__all__ = ["Compression"]


def _is_wider(tensor: Any) -> bool:
    return tensor.dtype.is_floating and tensor.dtype.size > 2


FP16Compressor, BF16Compressor, Compression = casts(__name__, tf.float16, tf.bfloat16, _is_wider, tf.cast)
