"""Collectives on tensors that gradients flow through: `allreduce`, `allgather` and `broadcast`.

A gradient is that of the sum of the losses of all ranks, so where the forward pass sends values to other ranks, the
backward pass brings their gradients back. Backward is therefore collective as well: every rank must run it, or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from horovodish import basics
from horovodish.collectives import Average, ReduceOp, Sum, checked_root, chosen_op, generated_name
from horovodish.torch.asynchronous import submit_allgather, submit_allreduce, submit_broadcast
from horovodish.torch.compression import Compression, Compressor


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce the tensors of all ranks, element by element, and give the result to every rank. Collective; blocks.

    result = postscale_factor * op(prescale_factor * tensor of rank 0, ..., prescale_factor * tensor of rank N-1)

    Differentiable where `op` is `Average` or `Sum`: its gradient is the allreduce of the gradients, in the same way.

    Args:
        tensor: the rank's values, in host memory; any shape and any dtype but bool, the same on every rank.
        average: Horovod's older way to say op=Average (True) or op=Sum (False).
        name: the operation's name, the same on every rank; counted when not given.
        compression: what travels; see `Compression`.
        op: `Average` (the default), `Sum`, `Min`, `Max` or `Product`. Average of integers floors.
        prescale_factor: multiplies every input. For integers the product is computed in float64 and truncated.
        postscale_factor: multiplies the result, in the same way.

    Returns:
        A new tensor of the shape and dtype of `tensor`, row-major.

    Raises:
        ValueError: `average` and `op` are both given, or `op` is `Adasum` or no reduce op.
        UnsupportedTensorError: a dtype, device or layout that the engine cannot take.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.allreduce(torch.full((2,), float(hvd.rank())), op=hvd.Sum)  # on 4 ranks
        tensor([6., 6.])
    """
    chosen = chosen_op(average, op)
    name = generated_name("allreduce") if name is None else name
    compressed, context = compression.compress(tensor)
    if _recorded(compressed):
        reduced: Tensor = _Allreduce.apply(compressed, chosen, name, prescale_factor, postscale_factor)
    else:
        reduced = _reduced(compressed, chosen, name, prescale_factor, postscale_factor)
    return compression.decompress(reduced, context)


def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Put the tensors of all ranks one after another, in the order of the ranks, on every rank. Collective; blocks.

    Differentiable: the gradient is the sum over the ranks of the gradients of this rank's rows.

    Args:
        tensor: the rank's rows, in host memory, of any dtype. The first dimension may differ between ranks and may be
            0; the others and the dtype may not. A tensor of zero dimensions counts as one row.
        name: the operation's name, the same on every rank; counted when not given.

    Returns:
        A new tensor whose first dimension is the sum of the ranks' first dimensions.

    Raises:
        UnsupportedTensorError: a dtype, device or layout that the engine cannot take.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank()))  # on 3 ranks
        tensor([0, 1, 1, 2, 2, 2])
    """
    name = generated_name("allgather") if name is None else name
    if _recorded(tensor):
        gathered: Tensor = _Allgather.apply(tensor, name)
        return gathered
    return submit_allgather(tensor, name, lambda rows, _: rows, waits=True).wait()


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Give every rank the values that one rank holds. Collective; blocks.

    Differentiable: on the root the gradient is the sum of the gradients of all ranks, on the others it is zero.

    Args:
        tensor: on the root the values to send, in host memory, of any dtype; on the others a tensor of the same shape
            and dtype, which is left as it is.
        root_rank: whose values to send, the same on every rank.
        name: the operation's name, the same on every rank; counted when not given.

    Returns:
        A new tensor with the root's values.

    Raises:
        ValueError: there is no rank `root_rank`.
        UnsupportedTensorError: a dtype, device or layout that the engine cannot take.
        MismatchError: the ranks disagree about the operation. `horovodish.collectives` lists the other errors.

    Example:
        >>> hvd.broadcast(torch.full((2,), hvd.rank()), root_rank=1)  # on any rank
        tensor([1, 1])
    """
    root = checked_root(root_rank)
    name = generated_name("broadcast") if name is None else name
    if _recorded(tensor):
        sent: Tensor = _Broadcast.apply(tensor, root, name)
        return sent
    return submit_broadcast(tensor, False, root, name, waits=True).wait()


def _recorded(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad


def _reduced(tensor: Tensor, op: ReduceOp, name: str, prescale_factor: float, postscale_factor: float) -> Tensor:
    return submit_allreduce(tensor, False, op, name, prescale_factor, postscale_factor, waits=True).wait()


def _gradient_of(name: str) -> str:
    # Named after the operation: the ranks' backward passes need not run their operations in one order.
    return f"{name}.gradient"


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, op: ReduceOp, name: str, prescale_factor: float, postscale_factor: float
    ) -> Tensor:
        ctx.arguments = (op, _gradient_of(name), prescale_factor, postscale_factor)
        return _reduced(tensor, op, name, prescale_factor, postscale_factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, name, *factors = ctx.arguments
        if op not in (Average, Sum):
            raise NotImplementedError(
                f"{name}: allreduce has a gradient for op=Average and op=Sum only, not for op={op.name.capitalize()}; "
                "pass tensor.detach() where none is wanted"
            )
        return _Allreduce.apply(gradients[0], op, name, *factors), None, None, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str) -> Tensor:
        gathered, counts = submit_allgather(tensor, name, lambda rows, counts: (rows, counts), waits=True).wait()
        ctx.name = _gradient_of(name)
        ctx.shape = tensor.shape
        ctx.begin = sum(counts[: basics.rank()])
        ctx.count = counts[basics.rank()]
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = _Allreduce.apply(gradients[0], Sum, ctx.name, 1.0, 1.0)
        return summed.narrow(0, ctx.begin, ctx.count).reshape(ctx.shape), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str) -> Tensor:
        ctx.name = _gradient_of(name)
        ctx.is_root = basics.rank() == root_rank
        return submit_broadcast(tensor, False, root_rank, name, waits=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = _Allreduce.apply(gradients[0], Sum, ctx.name, 1.0, 1.0)
        return (summed if ctx.is_root else torch.zeros_like(summed)), None, None
