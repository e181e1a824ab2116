"""The collectives as functions of the autograd graph, on groups of tensors.

A gradient is that of the sum of the losses of all ranks that take part, so where the forward pass sends values to other
ranks, the backward pass brings their gradients back. It is made of the same functions, so that it has gradients, too.
With the setting collective_gradients=horovod it is multiplied by `collective_gradients.factor`.

An operation of the backward pass is named after that of the forward pass: ranks need not run them in one order. A group
stays a group, and every member takes part, with zeros where the loss does not depend on it. Ranks that have joined had
no part in the forward pass and are left out of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from horovodish.collectives import collective_gradients
from horovodish.collectives.operation import Operation, checked_splits, only, split_numbers
from horovodish.collectives.process_sets import ProcessSet
from horovodish.collectives.reduce_ops import Average, Sum, chosen_op
from horovodish.runtime import basics
from horovodish.torch.adapter import TENSORS


def is_recorded(tensor: object) -> bool:
    """Whether autograd wants to know of an operation on this tensor."""
    return torch.is_grad_enabled() and isinstance(tensor, Tensor) and tensor.requires_grad


class Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = operation
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        return tuple(TENSORS.group(operation, tensors, waits=True).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = Allreduce.apply(_of_gradients(ctx.operation), *_chosen(gradients, ctx.floating))
        return None, *_spread(summed, ctx.floating)


class Allgather(torch.autograd.Function):
    """Gives the gathered tensors and after them, for each, how many rows each rank gave."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = _with_name(operation)
        gathered, counts = TENSORS.start(ctx.operation, tensors, _with_counts, waits=True).wait()
        own = operation.process_set.rank()
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        ctx.places = [(sum(rows[:own]), rows[own], tensor.shape) for rows, tensor in zip(counts, tensors, strict=True)]
        tables = [TENSORS.row_counts(rows) for rows in counts]
        ctx.mark_non_differentiable(*tables)
        return *gathered, *tables

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = Allreduce.apply(_sum_of_gradients(ctx.operation), *_chosen(gradients, ctx.floating))
        own = [
            gradient.narrow(0, begin, count).reshape(shape)
            for gradient, (begin, count, shape) in zip(summed, _chosen(ctx.places, ctx.floating), strict=True)
        ]
        return None, *_spread(own, ctx.floating)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, tensor: Tensor) -> Tensor:
        ctx.operation = _with_name(operation)
        return TENSORS.one(ctx.operation, tensor, waits=True).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = only(Allreduce.apply(_sum_of_gradients(ctx.operation), *gradients))
        return None, summed if basics.rank() == ctx.operation.root_rank else torch.zeros_like(summed)


class Alltoall(torch.autograd.Function):
    """Gives the rows that came and how many of them each rank sent."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, tensor: Tensor) -> tuple[Tensor, Tensor]:
        operation = _with_name(operation)._replace(splits=split_numbers(operation.splits))
        (rows,), (counts,) = TENSORS.start(operation, [tensor], _with_counts, waits=True).wait()
        ctx.sent = checked_splits(operation.splits, len(tensor), operation.process_set.size(), str(operation.name))
        ctx.back = operation._replace(name=_gradient_of(operation), splits=counts)
        table = TENSORS.row_counts(counts)
        ctx.mark_non_differentiable(table)
        return rows, table

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        returned, counts = Alltoall.apply(ctx.back, gradients[0])
        return None, _with_absent_rows(returned, counts.tolist(), ctx.sent)


class Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.operation = operation
        results = TENSORS.group(operation, tensors, waits=True).wait()
        ctx.floating = [tensor.is_floating_point() for tensor in tensors]
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        operation = _of_gradients(ctx.operation)
        own = _chosen(gradients, ctx.floating)
        # So that also a rank without rows can be told from one that has joined.
        mark = own[0].new_ones(1)
        gathered = Allgather.apply(Operation("allgather", operation.name, operation.process_set), *own, mark)
        tensors, counts = gathered[: len(own)], [table.tolist() for table in gathered[len(own) + 1 :]]
        factor = operation.prescale_factor * operation.postscale_factor * _factor(operation, sum(counts[-1]))
        whole = [
            _with_absent_rows(tensor, came, _dealt(rows, operation.process_set)) * factor
            for tensor, came, rows in zip(tensors, counts[:-1], _chosen(ctx.rows, ctx.floating), strict=True)
        ]
        return None, *_spread(whole, ctx.floating)


def _with_counts(results: list[Tensor], counts: list[list[int]]) -> tuple[list[Tensor], list[list[int]]]:
    return results, counts


def _with_name(operation: Operation) -> Operation:
    name, _ = operation.named()
    return operation._replace(name=name)


def _gradient_of(operation: Operation) -> str:
    return f"{operation.name}.gradient"


def _of_gradients(operation: Operation) -> Operation:
    """The reduction of the gradients.

    Raises:
        NotImplementedError: the op is not linear.
    """
    op = chosen_op(operation.average, operation.op)
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"{operation.name}: {operation.kind} has a gradient for op=Average and op=Sum only, not for "
            f"op={op.name.capitalize()}; pass tensor.detach() where none is wanted"
        )
    return operation._replace(name=_gradient_of(operation))


def _sum_of_gradients(operation: Operation) -> Operation:
    factor = _factor(operation, operation.process_set.size())
    return Operation("allreduce", _gradient_of(operation), operation.process_set, Sum, postscale_factor=factor)


def _factor(operation: Operation, ranks: int) -> float:
    op = chosen_op(operation.average, operation.op) if operation.kind == "reducescatter" else Sum
    return float(collective_gradients.factor(operation.kind, op, ranks, collective_gradients.are_horovods()))


def _chosen(values: Iterable[Any], floating: Sequence[bool]) -> list[Any]:
    """The values of the floating-point members. The other members have no gradient."""
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
