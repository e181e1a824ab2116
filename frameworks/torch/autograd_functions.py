"""The collectives as functions of the autograd graph, on groups of tensors.

A gradient is that of the sum of the losses of all ranks that take part, so where the forward pass sends values to other
ranks, the backward pass brings their gradients back. It is made of the same functions, so that it has gradients, too.

An operation of the backward pass is named after that of the forward pass: ranks need not run them in one order. A group
stays a group, and every member takes part, with zeros where the loss does not depend on it. Ranks that have joined had
no part in the forward pass and are left out of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from horovodish import basics
from horovodish.process_sets import ProcessSet
from horovodish.reduce_ops import Average, ReduceOp, Sum
from horovodish.torch.tensor_submission import (
    only,
    submit_allgather,
    submit_allreduce,
    submit_alltoall,
    submit_broadcast,
    submit_reducescatter,
)


class Reduction(NamedTuple):
    """What an allreduce or reducescatter does with its tensors."""

    op: ReduceOp
    name: str
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet

    def of_gradients(self, kind: str) -> Reduction:
        """The same of the gradients.

        Raises:
            NotImplementedError: the op is not linear.
        """
        if self.op not in (Average, Sum):
            raise NotImplementedError(
                f"{self.name}: {kind} has a gradient for op=Average and op=Sum only, not for "
                f"op={self.op.name.capitalize()}; pass tensor.detach() where none is wanted"
            )
        return self._replace(name=_gradient_of(self.name))


def is_recorded(tensor: object) -> bool:
    """Whether autograd wants to know of an operation on this tensor."""
    return torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad


def reduced(tensors: Sequence[Tensor], call: Reduction) -> list[Tensor]:
    """The allreduce, outside of the graph."""
    op, name, prescale_factor, postscale_factor, process_set = call
    return submit_allreduce(
        tensors, list, False, None, name, op, prescale_factor, postscale_factor, process_set, True
    ).wait()


def scattered(tensors: Sequence[Tensor], call: Reduction) -> list[Tensor]:
    """The reducescatter, outside of the graph."""
    op, name, prescale_factor, postscale_factor, process_set = call
    return submit_reducescatter(tensors, list, name, op, process_set, prescale_factor, postscale_factor, True).wait()


class Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Reduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        return tuple(reduced(tensors, call))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = Allreduce.apply(ctx.call.of_gradients("allreduce"), *_chosen(gradients, ctx.floating))
        return None, *_spread(summed, ctx.floating)


class Allgather(torch.autograd.Function):
    """Gives the gathered tensors and after them, for each, how many rows each rank gave."""

    @staticmethod
    def forward(ctx: Any, name: str, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        gathered, counts = submit_allgather(tensors, lambda *both: both, name, process_set, True).wait()
        own = process_set.rank()
        ctx.call = Reduction(Sum, _gradient_of(name), 1.0, 1.0, process_set)
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        ctx.places = [(sum(rows[:own]), rows[own], tensor.shape) for rows, tensor in zip(counts, tensors, strict=True)]
        tables = [torch.tensor(rows, dtype=torch.int64) for rows in counts]
        ctx.mark_non_differentiable(*tables)
        return *gathered, *tables

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = Allreduce.apply(ctx.call, *_chosen(gradients, ctx.floating))
        own = [
            gradient.narrow(0, begin, count).reshape(shape)
            for gradient, (begin, count, shape) in zip(summed, _chosen(ctx.places, ctx.floating), strict=True)
        ]
        return None, None, *_spread(own, ctx.floating)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str, process_set: ProcessSet) -> Tensor:
        ctx.call = Reduction(Sum, _gradient_of(name), 1.0, 1.0, process_set)
        ctx.is_root = basics.rank() == root_rank
        return submit_broadcast(tensor, False, root_rank, name, process_set, True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = only(Allreduce.apply(ctx.call, *gradients))
        return (summed if ctx.is_root else torch.zeros_like(summed)), None, None, None


class Alltoall(torch.autograd.Function):
    """Gives the rows that came and how many of them each rank sent."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Sequence[int], name: str, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        (rows,), (counts,) = submit_alltoall(tensor, splits, lambda *both: both, name, process_set, True).wait()
        ctx.sent, ctx.received = splits, counts
        ctx.name, ctx.process_set = _gradient_of(name), process_set
        table = torch.tensor(counts, dtype=torch.int64)
        ctx.mark_non_differentiable(table)
        return rows, table

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        returned, counts = Alltoall.apply(gradients[0], ctx.received, ctx.name, ctx.process_set)
        return _with_absent_rows(returned, counts.tolist(), ctx.sent), None, None, None


class Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Reduction, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return tuple(scattered(tensors, call))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        op, name, *factors, process_set = ctx.call.of_gradients("reducescatter")
        own = _chosen(gradients, ctx.floating)
        mark = torch.ones(1)  # so that also a rank without rows can be told from one that has joined
        gathered = Allgather.apply(name, process_set, *own, mark)
        tensors, counts = gathered[: len(own)], [table.tolist() for table in gathered[len(own) + 1 :]]
        factor = factors[0] * factors[1] / (sum(counts[-1]) if op is Average else 1)
        whole = [
            _with_absent_rows(tensor, came, _dealt(rows, process_set)) * factor
            for tensor, came, rows in zip(tensors, counts[:-1], _chosen(ctx.rows, ctx.floating), strict=True)
        ]
        return None, *_spread(whole, ctx.floating)


def _gradient_of(name: str) -> str:
    return f"{name}.gradient"


def _chosen(values: Iterable[Any], floating: Sequence[bool]) -> list[Any]:
    """Those of the floating-point members: the others have no gradient."""
    return [value for value, has in zip(values, floating, strict=False) if has]


def _spread(gradients: Iterable[Tensor], floating: Sequence[bool]) -> list[Tensor | None]:
    """The opposite of `_chosen`: None where there is no gradient."""
    following = iter(gradients)
    return [next(following) if has else None for has in floating]


def _dealt(rows: int, process_set: ProcessSet) -> list[int]:
    """How a reducescatter deals out its rows, by rank."""
    base, more = divmod(rows, process_set.size())
    return [base + (rank < more) for rank in range(process_set.size())]


def _with_absent_rows(rows: Tensor, came: Sequence[int], expected: Sequence[int]) -> Tensor:
    """`rows`, with zeros in the place of those of ranks that have joined and gave none."""
    if list(came) == list(expected):
        return rows
    parts = [
        part if len(part) else part.new_zeros((count, *rows.shape[1:]))
        for part, count in zip(rows.split(list(came)), expected, strict=True)
    ]
    return torch.cat(parts)
