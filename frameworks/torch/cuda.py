"""CUDA tensors: which device and stream they are on, and what the engine does with them where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from horovodish import devices
from horovodish.devices import HOST
from horovodish.errors import UnsupportedTensorError
from horovodish.reduce_ops import ReduceOp, Sum
from horovodish.torch.tensors import Member


class Way(NamedTuple):
    """How an operation is handed to the engine.

    Attributes:
        device: what the engine is told.
        current_stream: as `submission.submit`; None where the engine sees host memory.
        through_host: the tensors are on a device, but NCCL cannot do this, so copies in host memory travel.
    """

    device: int
    current_stream: Callable[[], int] | None
    through_host: bool


_ON_HOST = Way(HOST, None, False)


def way(
    kind: str,
    tensors: Sequence[Tensor],
    described: Sequence[Member],
    name: str,
    op: ReduceOp = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Way:
    """The way of an operation on these tensors.

    Raises:
        UnsupportedTensorError: the tensors are on more than one device, or as `devices.use`.
        ValueError: a CUDA graph is being captured.
    """
    ordinal = ordinal_of(tensors[0])
    for tensor in tensors:
        if ordinal_of(tensor) != ordinal:
            raise UnsupportedTensorError(
                f"{name}: tensors of one group are on {tensors[0].device} and on {tensor.device}; make it a group for "
                "each device"
            )
    if ordinal == HOST:
        return _ON_HOST
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name}: a CUDA graph is being captured, and collectives cannot be part of one; call it outside of the "
            "capture"
        )
    dtypes = [dtype for _, _, dtype, _ in described]
    device = devices.choose(kind, ordinal, op, dtypes, prescale_factor, postscale_factor, name)
    return Way(device, stream_getter(device), device == HOST)


def copies(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The values of `sources` in host memory, once they are computed, and room for those of `targets`."""
    return [source.to("cpu", copy=True) for source in sources], [
        torch.empty(target.shape, dtype=target.dtype) for target in targets
    ]


def copy_back(arrivals: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """The opposite of `copies`."""
    with torch.no_grad():
        for arrival, target in zip(arrivals, targets, strict=True):
            target.copy_(arrival)


def ordinal_of(tensor: Tensor) -> int:
    """The tensor's CUDA device, `HOST` for host memory."""
    return tensor.get_device() if tensor.is_cuda else HOST


def stream_getter(ordinal: int) -> Callable[[], int] | None:
    """A function that gives the handle of the stream that is current in the calling thread; None for host memory."""
    if ordinal == HOST:
        return None
    # torch.cuda.current_stream() makes an object each time, which costs more than all else in handing over a gradient.
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw_stream is None:
        return lambda: torch.cuda.current_stream(ordinal).cuda_stream
    return lambda: int(raw_stream(ordinal))
