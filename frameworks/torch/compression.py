"""Compression of tensors: what travels instead of a gradient."""

from __future__ import annotations

import torch

from horovodish.gradients.compression import Compressor as Compressor  # Horovod's users import it from here
from horovodish.gradients.compression import NoneCompressor as NoneCompressor
from horovodish.gradients.compression import casts

__all__ = ["Compression"]


def _is_wider(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() > 2


FP16Compressor, BF16Compressor, Compression = casts(__name__, torch.float16, torch.bfloat16, _is_wider, torch.Tensor.to)
