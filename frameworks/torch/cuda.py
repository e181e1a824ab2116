"""CUDA tensors: which device and stream they are on, and what the engine does with them where."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from horovodish.collectives import devices
from horovodish.collectives.devices import HOST, ON_HOST, Placement
from horovodish.collectives.operation import Member, Operation
from horovodish.errors import UnsupportedTensorError


def placement(operation: Operation, sources: Sequence[Tensor], members: Sequence[Member]) -> Placement:
    """Where an operation on these tensors takes place; without `members`, where they are.

    Raises:
        UnsupportedTensorError: the tensors are on more than one device, or as `devices.use`.
        ValueError: a CUDA graph is being captured.
    """
    name = str(operation.name)
    ordinal = ordinal_of(sources[0]) if sources else HOST
    for tensor in sources[1:]:
        if ordinal_of(tensor) != ordinal:
            raise UnsupportedTensorError(
                f"{name}: tensors of one group are on {sources[0].device} and on {tensor.device}; make it a group for "
                "each device"
            )
    if ordinal == HOST:
        return ON_HOST
    if not members:
        return Placement(ordinal, None, is_staged=False)
    if sources[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"{name}: a CUDA graph is being captured, and collectives cannot be part of one; call it outside of the "
            "capture"
        )
    device = devices.choose(operation, ordinal, [dtype for _, _, dtype, _ in members])
    return Placement(device, stream_getter(device), is_staged=device == HOST)


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


def work_so_far(tensor: Tensor) -> Callable[[], None]:
    """As `Adapter.work_so_far`, for the device of the tensor."""
    event = torch.cuda.current_stream(tensor.device).record_event()
    return lambda: torch.cuda.current_stream(tensor.device).wait_event(event)
