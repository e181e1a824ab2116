"""Collectives on tensors that give a handle, and those in place. None of them is part of the autograd graph.

The operations are documented in full in `horovodish.collectives`; what is said there about names, errors and
collective calls holds here, too. A tensor must not be changed, and the tensor of an operation in place not be read,
until `synchronize(handle)` returns.

Tensors are dense and in host memory, of any dtype that the engine knows; one whose elements do not lie one after
another is copied first, or refused where the operation is in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from horovodish import _native
from horovodish.collectives import Handle, ReduceOp, checked_root, chosen_op, generated_name, submit
from horovodish.torch.tensors import member, source_of, target_of

TensorT = TypeVar("TensorT", bound=Tensor)
T = TypeVar("T")


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """As `allreduce`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block.

    Example:
        >>> handles = [hvd.allreduce_async(value, name=key) for key, value in metrics.items()]
        >>> averages = [hvd.synchronize(handle) for handle in handles]
    """
    return submit_allreduce(tensor, False, chosen_op(average, op), name, prescale_factor, postscale_factor)


def allreduce_(
    tensor: TensorT,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TensorT:
    """As `allreduce`, but writes the result into `tensor` and returns it. Collective; blocks.

    Not differentiable. After an error the contents of `tensor` are undefined.

    Raises:
        UnsupportedTensorError: `tensor` is not contiguous, besides what every operation refuses.
    """
    return submit_allreduce(
        tensor, True, chosen_op(average, op), name, prescale_factor, postscale_factor, waits=True
    ).wait()


def allreduce_async_(
    tensor: TensorT,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[TensorT]:
    """As `allreduce_`, but gives a handle; `tensor` holds the result after `synchronize(handle)`. Collective."""
    return submit_allreduce(tensor, True, chosen_op(average, op), name, prescale_factor, postscale_factor)


def allgather_async(tensor: Tensor, name: str | None = None) -> Handle[Tensor]:
    """As `allgather`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return submit_allgather(tensor, name, lambda rows, _: rows)


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None) -> Handle[Tensor]:
    """As `broadcast`, but gives a handle; `synchronize(handle)` gives the result. Collective; does not block."""
    return submit_broadcast(tensor, False, root_rank, name)


def broadcast_(tensor: TensorT, root_rank: int, name: str | None = None) -> TensorT:
    """As `broadcast`, but writes the root's values into `tensor` and returns it. Collective; blocks.

    Not differentiable. After an error the contents of `tensor` are undefined on the ranks that are not the root.

    Raises:
        UnsupportedTensorError: `tensor` is not contiguous, besides what every operation refuses.
    """
    return submit_broadcast(tensor, True, root_rank, name, waits=True).wait()


def broadcast_async_(tensor: TensorT, root_rank: int, name: str | None = None) -> Handle[TensorT]:
    """As `broadcast_`, but gives a handle; `tensor` holds the values after `synchronize(handle)`. Collective."""
    return submit_broadcast(tensor, True, root_rank, name)


def submit_allreduce(
    tensor: TensorT,
    in_place: bool,
    op: ReduceOp,
    name: str | None,
    prescale_factor: float,
    postscale_factor: float,
    *,
    waits: bool = False,
) -> Handle[TensorT]:
    name = generated_name("allreduce") if name is None else name
    source, target = _source_and_target(tensor, in_place, name)
    return submit(
        "allreduce",
        name,
        [member(source, target, name, reduces=True)],
        keep_alive=(source, target),
        result=lambda _: _written(target, in_place),
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        waits=waits,
    )


def submit_allgather(
    tensor: Tensor, name: str | None, result: Callable[[Tensor, list[int]], T], *, waits: bool = False
) -> Handle[T]:
    """`result` makes the caller's result from all ranks' rows and the number of rows of each rank."""
    name = generated_name("allgather") if name is None else name
    source = source_of(tensor, name)
    if source.dim() == 0:
        source = source.reshape(1)
    dtype, row_shape = source.dtype, source.shape[1:]

    def finish(native: _native.Handle) -> T:
        counts = native.rows(0)
        shape = (sum(counts), *row_shape)
        if math.prod(shape) == 0:
            return result(torch.empty(shape, dtype=dtype), counts)
        return result(torch.frombuffer(native.output(0), dtype=dtype).reshape(shape), counts)

    return submit(
        "allgather",
        name,
        [member(source, None, name, reduces=False)],
        keep_alive=source,
        result=finish,
        waits=waits,
    )


def submit_broadcast(
    tensor: TensorT, in_place: bool, root_rank: int, name: str | None, *, waits: bool = False
) -> Handle[TensorT]:
    root = checked_root(root_rank)
    name = generated_name("broadcast") if name is None else name
    source, target = _source_and_target(tensor, in_place, name)
    return submit(
        "broadcast",
        name,
        [member(source, target, name, reduces=False)],
        keep_alive=(source, target),
        result=lambda _: _written(target, in_place),
        root_rank=root,
        waits=waits,
    )


def _source_and_target(tensor: TensorT, in_place: bool, name: str) -> tuple[Tensor, TensorT]:
    if in_place:
        return tensor, target_of(tensor, name)
    source = source_of(tensor, name)
    return source, cast(TensorT, torch.empty_like(source))


def _written(target: TensorT, in_place: bool) -> TensorT:
    # Autograd cannot see what the engine writes. If it has saved this tensor for a backward, it must complain as usual.
    if in_place:
        increment_version(target)
    return target
