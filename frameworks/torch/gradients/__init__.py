"""Gradients that are all there at once, as Keras hands them over on its PyTorch backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovodish.collectives.devices import HOST
from horovodish.gradients.plan import GradientAdapter, Layout, Payload
from horovodish.torch import cuda
from horovodish.torch.adapter import TENSORS
from horovodish.torch.tensors import parameter_checksums


class _Gradients(GradientAdapter):
    """Gradients of Keras's variables. They are dense."""

    tensors = TENSORS

    def checksum(self, source: Any) -> tuple[str, int]:
        ((_, checksum),) = parameter_checksums([("", source.value)]).items()
        return checksum

    def on_gpu(self, gradients: Sequence[Any]) -> bool:
        return any(cuda.ordinal_of(each) != HOST for each in gradients)

    def payload(self, tensor: Tensor, source: Any) -> Payload:
        return Payload(tensor.numel() * tensor.element_size(), tensor.dtype, tensor.device)

    def filled(self, gradient: None, source: Any, layout: Layout) -> Tensor:
        return torch.zeros_like(source.value)


GRADIENTS = _Gradients()
