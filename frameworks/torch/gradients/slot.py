"""The record of `Reducer` and `StepReducer` about one parameter: how its gradient, or its change, travels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovodish.collectives import devices
from horovodish.collectives.reduce_ops import Max, Min, Product
from horovodish.errors import UnsupportedTensorError
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.plan import Payload
from horovodish.torch import cuda
from horovodish.torch.compression import Compression
from horovodish.torch.tensors import check_tensor, dtype_code


class Slot:
    """One parameter that requires a gradient.

    A gradient has the strides of its parameter, so a parameter whose elements lie one after another in any order, such
    as one in channels-last format, travels without a copy as what it is in memory: `view` permutes its dimensions so
    that it is row-major. A complex gradient travels as its real and imaginary parts.

    Attributes:
        name: the parameter's name.
        parameter: the parameter.
        plain: the gradient can be handed to the engine unchanged, once it is known to be contiguous.
        dtype: of the tensor that travels.
        shape: of the tensor that travels.
        code: the engine's number of `dtype`.
        codec: encodes between hosts; None: values travel unencoded.
        device: of the tensor that travels, `devices.HOST` for host memory. Gradients on a GPU travel through host
            memory where NCCL cannot reduce them.
    """

    def __init__(self, name: str, parameter: Tensor, options: GradientOptions):
        """
        Raises:
            UnsupportedTensorError: the gradient's dtype, or what `compression` makes of it, is none of the engine's, or
                the parameter is not a dense tensor in host memory or on the GPU of this rank.
        """
        check_tensor(parameter, f"parameter {name}")
        self.parameter = parameter
        compression = self._compression = options.compression
        # Newer versions of torch let a gradient's dtype be another one than the parameter's, or any (None).
        grad_dtype: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
        self._grad_dtype = grad_dtype or parameter.dtype
        self._is_complex = self._grad_dtype.is_complex
        if self._is_complex and options.op in (Min, Max, Product):
            raise UnsupportedTensorError(
                f"gradient of {name}: {self._grad_dtype} has no op={options.op.name.capitalize()}; use op=Average or "
                "op=Sum"
            )
        # The stride of a dimension of length 1 means nothing, and may differ between ranks.
        strides = [math.inf if length == 1 else parameter.stride(place) for place, length in enumerate(parameter.shape)]
        order = sorted(range(parameter.dim()), key=strides.__getitem__, reverse=True)
        row_major = parameter.is_contiguous() or not parameter.permute(order).is_contiguous()
        self._order = None if row_major else order
        # Two orders may have one shape, so the name must tell them apart when the ranks compare. So may a complex
        # parameter and one with another dimension of length 2.
        self.name = name if row_major else f"{name} (memory format with the dimensions in the order {order})"
        self.name += " (complex)" if self._is_complex else ""
        payload, _ = self._zeros()
        self.dtype, self.shape = payload.dtype, tuple(payload.shape)
        self.code = dtype_code(self.dtype, f"gradient of {name}", reduces=True)
        self.codec = None if options.codec is None else options.codec.of(name, tuple(parameter.shape))
        operation = options.operation(f"gradient of {name}")._replace(codec=self.codec)
        ordinal = cuda.ordinal_of(parameter)
        self.device = devices.choose(operation, ordinal, [self.code])
        self._device = parameter.device
        self._through_host = self.device != ordinal
        self.size_bytes = payload.numel() * payload.element_size()
        changes = self._through_host or self._is_complex or not row_major or compression is not Compression.none
        self.plain = not changes and grad_dtype is not None

    def payload_in(self, group: int | None) -> Payload:
        """The payload for planning buckets, in a group or in none."""
        return Payload(self.size_bytes, self.dtype, self.device, group, self.codec)

    def payload(self, gradient: Tensor) -> tuple[Tensor, Any]:
        """The contiguous tensor that travels for `gradient`, and the context of its compression.

        Raises:
            UnsupportedTensorError: `gradient` is not what was announced when the buckets were planned.
        """
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if gradient.device != self._device:
            raise UnsupportedTensorError(
                f"gradient of {self.name}: it is on {gradient.device}, but the parameter was on {self._device} when "
                "the optimizer was wrapped; move the model before that"
            )
        compressed, context = self._compression.compress(self._view(gradient))
        if compressed.dtype != self.dtype or tuple(compressed.shape) != self.shape:
            raise UnsupportedTensorError(
                f"gradient of {self.name}: {compressed.dtype} of shape {tuple(compressed.shape)} is to travel, but the "
                f"buckets were planned for {self.dtype} of shape {self.shape}; both must stay as they were when the "
                "optimizer was wrapped"
            )
        return self._departing(compressed), context

    def flat(self, gradient: Tensor) -> Tensor:
        """The elements of a gradient in the order of the parameter's memory; shape (n,)."""
        return self._view(gradient).reshape(-1)

    def neutral(self) -> tuple[Tensor, Any]:
        """The zeros that travel where this rank has no gradient, and the context of their compression."""
        payload, context = self._zeros()
        return self._departing(payload), context

    def gradient(self, payload: Tensor, context: Any) -> Tensor:
        """The opposite of `payload`, of the reduced tensor; it may share its memory."""
        payload = payload.to(self._device) if self._through_host else payload
        decompressed: Tensor = self._compression.decompress(payload, context)
        if self._is_complex:
            decompressed = torch.view_as_complex(decompressed)
        if self._order is None:
            return decompressed
        inverse = sorted(range(len(self._order)), key=self._order.__getitem__)
        return decompressed.permute(inverse)

    def _zeros(self) -> tuple[Tensor, Any]:
        return self._compression.compress(self._view(torch.zeros_like(self.parameter, dtype=self._grad_dtype)))

    def _departing(self, payload: Tensor) -> Tensor:
        resolved = payload.resolve_neg()
        return resolved.to("cpu", copy=True).contiguous() if self._through_host else resolved.contiguous()

    def _view(self, tensor: Tensor) -> Tensor:
        permuted = tensor if self._order is None else tensor.permute(self._order)
        return torch.view_as_real(permuted.resolve_conj()) if self._is_complex else permuted


def members_of(slots: Sequence[Slot], buckets: Sequence[Sequence[int]]) -> list[tuple[str, int, tuple[int, ...], int]]:
    """The members of a native plan: what travels for each slot, and the number of its bucket."""
    number_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    return [(slot.name, slot.code, slot.shape, number_of[index]) for index, slot in enumerate(slots)]
