"""The collectives as functions of the autograd graph, on groups of tensors.

Their gradients follow `collectives/derivatives.py`. A gradient is made of the same functions, so it has gradients, too.

An operation of the backward pass is named after its operation of the forward pass: ranks may run them in any order. A
group stays a group, and every member takes part, with zeros where the loss does not depend on it. Ranks that have
joined had no part in the forward pass and are left out of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from horovodish.collectives.adapter import checked_splits, dealt_rows, identified, only, split_numbers
from horovodish.collectives.derivatives import are_horovods, check_linear, chosen, factor, opposite, spread
from horovodish.collectives.operation import Operation
from horovodish.runtime import basics
from horovodish.torch.adapter import TENSORS

_REMEDY = "tensor.detach()"


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
        check_linear(ctx.operation, _REMEDY)
        summed = Allreduce.apply(_back(ctx.operation), *chosen(gradients, ctx.floating))
        return None, *spread(summed, ctx.floating)


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
        summed = Allreduce.apply(_sum_back(ctx.operation), *chosen(gradients, ctx.floating))
        own = [
            gradient.narrow(0, begin, count).reshape(shape)
            for gradient, (begin, count, shape) in zip(summed, chosen(ctx.places, ctx.floating), strict=True)
        ]
        return None, *spread(own, ctx.floating)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operation: Operation, tensor: Tensor) -> Tensor:
        ctx.operation = _with_name(operation)
        return TENSORS.now(ctx.operation, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        summed = only(Allreduce.apply(_sum_back(ctx.operation), *gradients))
        return None, summed if basics.rank() == ctx.operation.root_rank else torch.zeros_like(summed)


class Alltoall(torch.autograd.Function):
    """Gives the rows that came and how many of them each rank sent."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, tensor: Tensor) -> tuple[Tensor, Tensor]:
        operation = _with_name(operation)._replace(splits=split_numbers(operation.splits))
        (rows,), (counts,) = TENSORS.start(operation, [tensor], _with_counts, waits=True).wait()
        ctx.sent = checked_splits(operation.splits, len(tensor), operation.process_set.size(), str(operation.name))
        ctx.back = _back(operation)._replace(splits=counts)
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
        check_linear(ctx.operation, _REMEDY)
        own = chosen(gradients, ctx.floating)
        # So that also a rank without rows can be told from one that has joined.
        mark = own[0].new_ones(1)
        gathered = Allgather.apply(_back(ctx.operation), *own, mark)
        tensors, counts = gathered[: len(own)], [table.tolist() for table in gathered[len(own) + 1 :]]
        scale = float(factor(ctx.operation, sum(counts[-1]), are_horovods()))
        whole = [
            _with_absent_rows(tensor, came, dealt_rows(rows, ctx.operation.process_set)) * scale
            for tensor, came, rows in zip(tensors, counts[:-1], chosen(ctx.rows, ctx.floating), strict=True)
        ]
        return None, *spread(whole, ctx.floating)


def _with_counts(results: list[Tensor], counts: list[list[int]]) -> tuple[list[Tensor], list[list[int]]]:
    return results, counts


def _with_name(operation: Operation) -> Operation:
    name, _ = identified(operation)
    return operation._replace(name=name)


def _back(operation: Operation, multiplied_by: float = 1.0) -> Operation:
    return opposite(operation, multiplied_by)._replace(name=f"{operation.name}.gradient")


def _sum_back(operation: Operation) -> Operation:
    return _back(operation, float(factor(operation, operation.process_set.size(), are_horovods())))


def _with_absent_rows(rows: Tensor, came: Sequence[int], expected: Sequence[int]) -> Tensor:
    """`rows`, with rows of zeros for ranks that have joined and gave none."""
    if list(came) == list(expected):
        return rows
    parts = [
        part if len(part) else part.new_zeros((count, *rows.shape[1:]))
        for part, count in zip(rows.split(list(came)), expected, strict=True)
    ]
    return torch.cat(parts)
