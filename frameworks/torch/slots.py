"""What the reducer knows about one parameter: how its gradient travels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horovodish.errors import UnsupportedTensorError
from horovodish.torch.compression import Compression, Compressor
from horovodish.torch.tensors import check_host_memory, dtype_code


class Slot:
    """One parameter that requires a gradient.

    A gradient has the strides of its parameter, so a parameter whose elements lie one after another in any order, such
    as one in channels-last format, travels without a copy as what it is in memory: `view` permutes its dimensions so
    that it is row-major.

    Attributes:
        name: the parameter's name.
        parameter: the parameter.
        plain: the gradient can be handed to the engine as it is, once it is seen to be contiguous.
        dtype: of what travels.
        shape: of what travels.
        code: the engine's number of `dtype`.
    """

    def __init__(self, name: str, parameter: Tensor, compression: Compressor):
        """
        Raises:
            UnsupportedTensorError: the gradient's dtype, or what `compression` makes of it, is none of the engine's, or
                the parameter is not a dense tensor in host memory.
        """
        check_host_memory(parameter, f"parameter {name}")
        self.parameter = parameter
        self._compression = compression
        # Newer versions of torch let a gradient's dtype be another one than the parameter's, or any (None).
        grad_dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
        self._grad_dtype = grad_dtype or parameter.dtype
        order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
        row_major = parameter.is_contiguous() or not parameter.permute(order).is_contiguous()
        self._order = None if row_major else order
        # Two orders may have one shape, so the name must tell them apart when the ranks compare.
        self.name = name if row_major else f"{name} (dimensions in the order {order})"
        payload, _ = self._zeros()
        self.dtype, self.shape = payload.dtype, tuple(payload.shape)
        self.code = dtype_code(self.dtype, f"gradient of {name}", reduces=True)
        self.size_bytes = payload.numel() * payload.element_size()
        self.plain = row_major and compression is Compression.none and grad_dtype is not None

    def payload(self, gradient: Tensor) -> tuple[Tensor, Any]:
        """What travels for `gradient`, contiguous, and the context of its compression.

        Raises:
            UnsupportedTensorError: `gradient` is not what was announced when the buckets were planned.
        """
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        compressed, context = self._compression.compress(self._view(gradient))
        if compressed.dtype != self.dtype or tuple(compressed.shape) != self.shape:
            raise UnsupportedTensorError(
                f"gradient of {self.name}: {compressed.dtype} of shape {tuple(compressed.shape)} is to travel, but the "
                f"buckets were planned for {self.dtype} of shape {self.shape}; both must stay as they were when the "
                "optimizer was wrapped"
            )
        return compressed.contiguous(), context

    def neutral(self) -> tuple[Tensor, Any]:
        """What travels where this rank has no gradient: zeros; and the context of their compression."""
        payload, context = self._zeros()
        return payload.contiguous(), context

    def gradient(self, payload: Tensor, context: Any) -> Tensor:
        """The opposite of `payload`, of the reduced tensor; it may share its memory."""
        decompressed = self._compression.decompress(payload, context)
        if self._order is None:
            return decompressed
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return decompressed.permute(inverse)

    def _zeros(self) -> tuple[Tensor, Any]:
        shape = self._view(self.parameter).shape
        return self._compression.compress(torch.zeros(shape, dtype=self._grad_dtype))

    def _view(self, tensor: Tensor) -> Tensor:
        return tensor if self._order is None else tensor.permute(self._order)
