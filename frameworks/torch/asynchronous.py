"""Collectives on tensors that give a handle, and those in place. None of them is part of the autograd graph.

The operations are documented in full in `horovodish.collectives`; what is said there about names, errors, process sets
and collective calls holds here, too. A tensor must not be changed, and the tensor of an operation in place not be read,
until `synchronize(handle)` returns.

Tensors are dense, in host memory or on this rank's GPU (see docs/gpu.md), of any dtype that the engine knows; one whose
elements do not lie one after another is copied first, or refused where the operation is in place. As with torch's own
collectives, a leaf that requires a gradient may be written in place; autograd complains if it has saved the old values
for a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from horovodish.process_sets import ProcessSet, global_process_set
from horovodish.reduce_ops import Average, ReduceOp
from horovodish.submission import Handle
from horovodish.torch.tensor_submission import (
    only,
    submit_allgather,
    submit_allreduce,
    submit_alltoall,
    submit_broadcast,
    submit_reducescatter,
)

TensorT = TypeVar("TensorT", bound=Tensor)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `allreduce`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block.

    Example:
        >>> handles = [hvd.allreduce_async(value, name=key) for key, value in metrics.items()]
        >>> averages = [hvd.synchronize(handle) for handle in handles]
    """
    return submit_allreduce(
        [tensor], only, False, average, name, op, prescale_factor, postscale_factor, process_set, False
    )


def allreduce_(
    tensor: TensorT,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> TensorT:
    """As `allreduce`, but writes the result into `tensor` and returns it. Collective; blocks.

    Not differentiable. After an error the contents of `tensor` are undefined.

    Raises:
        UnsupportedTensorError: `tensor` is not contiguous, besides what every operation refuses.
    """
    submit_allreduce(
        [tensor], only, True, average, name, op, prescale_factor, postscale_factor, process_set, True
    ).wait()
    return tensor


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """As `allreduce_`, but gives a handle; `tensor` holds the result after `synchronize(handle)`. Collective."""
    return submit_allreduce(
        [tensor], only, True, average, name, op, prescale_factor, postscale_factor, process_set, False
    )


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """As `allgather`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return submit_allgather([tensor], lambda gathered, _: only(gathered), name, process_set, False)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """As `broadcast`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return submit_broadcast(tensor, False, root_rank, name, process_set, False)


def broadcast_(
    tensor: TensorT, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> TensorT:
    """As `broadcast`, but writes the root's values into `tensor` and returns it. Collective; blocks.

    Not differentiable. After an error the contents of `tensor` are undefined on the ranks that are not the root.

    Raises:
        UnsupportedTensorError: `tensor` is not contiguous, besides what every operation refuses.
    """
    submit_broadcast(tensor, True, root_rank, name, process_set, True).wait()
    return tensor


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """As `broadcast_`, but gives a handle; `tensor` holds the values after `synchronize(handle)`. Collective."""
    return submit_broadcast(tensor, True, root_rank, name, process_set, False)


def alltoall_async(
    tensor: Tensor,
    splits: Sequence[int] | Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Any]:
    """As `alltoall`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return exchange(tensor, splits, name, process_set, False)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """As `reducescatter`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return submit_reducescatter([tensor], only, name, op, process_set, prescale_factor, postscale_factor, False)


def exchange(
    tensor: Tensor, splits: Sequence[int] | Tensor | None, name: str | None, process_set: ProcessSet, waits: bool
) -> Handle[Any]:
    """An alltoall; its result is the rows, and with `splits` also how many came from each rank."""

    def result(received: list[Tensor], counts: list[list[int]]) -> Tensor | tuple[Tensor, Tensor]:
        return received[0] if splits is None else (received[0], torch.tensor(counts[0], dtype=torch.int64))

    return submit_alltoall(tensor, splits, result, name, process_set, waits)
