"""PyTorch's tensors as the engine needs them. Nothing in this module is part of the autograd graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from horovodish import _native
from horovodish.collectives.adapter import Adapter
from horovodish.collectives.devices import Placement
from horovodish.collectives.functions import Collectives
from horovodish.torch import cuda, writes
from horovodish.torch.tensors import member, source_of, target_of

__all__ = ["COLLECTIVES", "TENSORS"]


class _TensorAdapter(Adapter[Tensor]):
    noun = "tensor"

    source = staticmethod(source_of)
    member = staticmethod(member)
    placement = staticmethod(cuda.placement)

    def target(self, tensor: Any, name: str) -> Tensor:
        target: Tensor = target_of(tensor, name)
        writes.note(target)
        return target

    def empty(self, source: Tensor, shape: Sequence[int] | None) -> Tensor:
        return torch.empty_like(source) if shape is None else source.new_empty(shape)

    def copies(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return [source.to("cpu", copy=True) for source in sources], [
            torch.empty(target.shape, dtype=target.dtype, device="cpu") for target in targets
        ]

    def copy_back(self, arrivals: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for arrival, target in zip(arrivals, targets, strict=True):
                target.copy_(arrival)

    def work_so_far(self, target: Tensor) -> Callable[[], None]:
        return cuda.work_so_far(target)

    def written(self, targets: Sequence[Tensor]) -> None:
        # Autograd cannot see what the engine writes, but must complain if it has saved a tensor for a backward.
        for target in targets:  # PyTorch 2.1 takes one at a time
            increment_version(target)

    def received(self, native: _native.Handle, index: int, source: Tensor, rows: int, placement: Placement) -> Tensor:
        shape = (rows, *source.shape[1:])
        if placement.current_stream is not None:
            # Into memory of torch's own allocator, which knows best when it may be used again.
            own = source.new_empty(shape)
            native.move_output(index, own.data_ptr(), placement.current_stream())
            return own
        empty = math.prod(shape) == 0  # torch.frombuffer refuses empty buffers
        flat = source.new_empty(0) if empty else torch.frombuffer(native.output(index), dtype=source.dtype)
        return flat.reshape(shape)

    def row_counts(self, counts: Sequence[int]) -> Tensor:
        return torch.tensor(counts, dtype=torch.int64, device="cpu")


TENSORS = _TensorAdapter()
COLLECTIVES = Collectives[Tensor, Tensor](TENSORS)
"""The collectives that autograd does not see."""
