"""Gradients flow through the collectives: those of the sum of all ranks' losses, on all ranks and on process sets.

Each case states in plain torch what every rank gets from all ranks' inputs; autograd then gives the gradient that the
collective must have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import horovodish.torch as hvd
from support.on_ranks import on_ranks
from support.tensors import sets_with_this_rank

Group = list[Tensor]


def check(
    call: Callable[[Group], Sequence[Tensor]],
    model: Callable[[list[Group]], list[list[Tensor]]],
    inputs: list[Group],
    own: int,
    tolerance: float = 1e-6,
) -> None:
    """`call` on this rank's inputs, and its gradients, against `model`, which gives all ranks' outputs."""
    mine = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs[own]]
    theirs = [[tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in group] for group in inputs]
    results, expected = call(mine), model(theirs)
    for result, value in zip(results, expected[own], strict=True):
        torch.testing.assert_close(result, value, rtol=tolerance, atol=tolerance)
    sum(map(loss, results, [own] * len(results))).backward()  # type: ignore[union-attr]
    total: Any = sum(loss(value, rank) for rank, group in enumerate(expected) for value in group)
    wanted = [tensor for tensor in theirs[own] if tensor.requires_grad]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    given = [tensor.grad for tensor in mine if tensor.requires_grad]
    for tensor, gradient, value in zip(wanted, given, gradients, strict=True):
        value = torch.zeros_like(tensor) if value is None else value
        torch.testing.assert_close(gradient, value, rtol=tolerance, atol=tolerance)


def loss(result: Tensor, rank: int) -> Tensor:
    """A loss with another slope for each element and each rank."""
    return (result * torch.arange(1.0, result.numel() + 1).reshape(result.shape)).sum() * (rank + 1)


def numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).float()


def through_allreduce(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    inputs = [[numbers(rank, 3, 2)] for rank in range(size)]
    for op, share in [(hvd.Sum, 1.0), (hvd.Average, 1 / size)]:
        for before, after in [(1.0, 1.0), (0.5, 3.0)]:
            factor = share * before * after

            def call(group: Group, op: Any = op, before: float = before, after: float = after) -> Group:
                factors = {"prescale_factor": before, "postscale_factor": after}
                return [hvd.allreduce(group[0], op=op, process_set=process_set, **factors)]

            check(call, lambda groups, f=factor: [[sum(g[0] for g in groups) * f]] * size, inputs, own)


def through_allgather(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    for inputs in (
        [[numbers(rank, rank, 2)] for rank in range(size)],  # nothing from the first
        [[numbers(rank)] for rank in range(size)],  # no dimension
    ):
        check(
            lambda group: [hvd.allgather(group[0], process_set=process_set)],
            lambda groups: [[torch.cat([torch.atleast_1d(g[0]) for g in groups])]] * size,
            inputs,
            own,
        )


def through_broadcast(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    for i, root in enumerate(process_set.ranks):
        check(
            lambda group, root=root: [hvd.broadcast(group[0], root, process_set=process_set)],
            lambda groups, i=i: [[groups[i][0] * 1]] * size,
            [[numbers(rank, 2, 3)] for rank in range(size)],
            own,
        )


def through_alltoall(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    splits = [[(2 * rank + 3 * to) % 4 for to in range(size)] for rank in range(size)]
    for given in (splits, [[2] * size] * size):
        even = given is not splits

        def call(group: Group, given: Any = given, even: bool = even) -> Group:
            if even:
                return [hvd.alltoall(group[0], process_set=process_set)]
            splits = torch.tensor(given[own]) if own % 2 else iter(given[own])
            rows, counts = hvd.alltoall(group[0], splits, process_set=process_set)  # type: ignore[arg-type]
            assert counts.tolist() == [row[own] for row in given] and not counts.requires_grad
            return [rows]

        check(
            call,
            lambda groups, given=given: [
                [torch.cat([g[0].split(given[i])[rank] for i, g in enumerate(groups)])] for rank in range(size)
            ],
            [[numbers(rank, sum(given[rank]), 2)] for rank in range(size)],
            own,
        )


def through_reducescatter(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    for rows in (1, size, 2 * size + 1):
        for op, share in [(hvd.Sum, 1.0), (hvd.Average, 1 / size)]:
            check(
                lambda group, op=op: [
                    hvd.reducescatter(
                        group[0], op=op, process_set=process_set, prescale_factor=0.5, postscale_factor=3.0
                    )
                ],
                lambda groups, f=share * 1.5: [[part] for part in (sum(g[0] for g in groups) * f).tensor_split(size)],
                [[numbers(rank, rows, 2)] for rank in range(size)],
                own,
            )


def through_groups(process_set: hvd.ProcessSet) -> None:
    """Members of several dtypes, some without gradients; the others' gradients are a group, too."""
    own, size = process_set.rank(), process_set.size()
    inputs = [[numbers(rank, 2 * size, 2), torch.arange(2 * size), numbers(rank + 9, size + 1)] for rank in range(size)]
    floats = [[group[0], group[2]] for group in inputs]
    cases: list[tuple[Any, Any]] = [
        (
            lambda group: hvd.grouped_allreduce(group, op=hvd.Sum, process_set=process_set),
            lambda groups: [[sum(members) for members in zip(*groups, strict=True)]] * size,
        ),
        (
            # Of any kind of group, as the values of a dict.
            lambda group: hvd.grouped_allgather(dict(enumerate(group)).values(), process_set=process_set),  # type: ignore[arg-type]
            lambda groups: [[torch.cat(members) for members in zip(*groups, strict=True)]] * size,
        ),
        (
            lambda group: hvd.grouped_reducescatter(group, op=hvd.Sum, process_set=process_set),
            lambda groups: [
                [sum(members).tensor_split(size)[rank] for members in zip(*groups, strict=True)]  # type: ignore[union-attr]
                for rank in range(size)
            ],
        ),
    ]
    for call, model in cases:
        check(call, model, inputs, own)
        # Of what the loss depends on only in part, all of the group takes part nevertheless.
        check(
            lambda group, call=call: call(group)[:1],
            lambda groups, model=model: [o[:1] for o in model(groups)],
            floats,
            own,
        )


def inputs_of_any_layout(process_set: hvd.ProcessSet) -> None:
    own, size = process_set.rank(), process_set.size()
    inputs = [[numbers(rank, 2, 2 * size)] for rank in range(size)]
    check(
        lambda group: [hvd.allreduce(group[0].t(), op=hvd.Sum, process_set=process_set).t()],
        lambda groups: [[sum(g[0] for g in groups)]] * size,
        inputs,
        own,
    )
    check(
        lambda group: [hvd.reducescatter(group[0].t()[:, :1].expand(-1, 3), op=hvd.Sum, process_set=process_set)],
        lambda groups: [[p] for p in sum(g[0].t()[:, :1].expand(-1, 3) for g in groups).tensor_split(size)],  # type: ignore[union-attr]
        inputs,
        own,
    )


def used_twice(process_set: hvd.ProcessSet) -> None:
    """The same input in two operations, one name twice in a graph, and a result that is used twice."""
    own, size = process_set.rank(), process_set.size()

    def call(group: Group) -> Group:
        first = hvd.allreduce(group[0], op=hvd.Sum, name="twice", process_set=process_set)
        second = hvd.allreduce(first * group[0], op=hvd.Sum, name="twice", process_set=process_set)
        return [second + first, hvd.allgather(first, name="twice", process_set=process_set)]

    def model(groups: list[Group]) -> list[Group]:
        first: Any = sum(g[0] for g in groups)
        second = sum(first * g[0] for g in groups)
        return [[second + first, torch.cat([first] * size)]] * size

    check(call, model, [[numbers(rank, 2, 3)] for rank in range(size)], own, tolerance=1e-5)


def the_second_derivative(process_set: hvd.ProcessSet) -> None:
    size = process_set.size()
    even = [1] * size
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=process_set),
        lambda x: hvd.allgather(x, process_set=process_set),
        lambda x: hvd.alltoall(x, even, process_set=process_set)[0],
        lambda x: hvd.reducescatter(x, op=hvd.Sum, process_set=process_set),
    ]
    for call in calls:
        x = torch.full((size,), 2.0, requires_grad=True)
        (first,) = torch.autograd.grad(call(x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        # Each output counts once on every rank that gets it.
        copies = first.detach()[0] / 12
        assert copies in (1.0, float(size))
        torch.testing.assert_close(second, torch.full((size,), 12.0) * copies)


@on_ranks(1, 3)
def test_on_process_sets() -> None:
    with sets_with_this_rank() as sets:
        for process_set in sets:
            through_allreduce(process_set)
            through_allgather(process_set)
            through_broadcast(process_set)
            through_alltoall(process_set)
            through_reducescatter(process_set)
            through_groups(process_set)
            inputs_of_any_layout(process_set)
            used_twice(process_set)
            the_second_derivative(process_set)


@on_ranks(1, 3)
def test_through_compression() -> None:
    own, size = hvd.rank(), hvd.size()
    check(
        lambda group: [hvd.allreduce(group[0], op=hvd.Sum, compression=hvd.Compression.fp16, postscale_factor=1.5)],
        lambda groups: [[sum(g[0] for g in groups) * 1.5]] * size,
        [[numbers(rank, 3, 2)] for rank in range(size)],
        own,
        tolerance=2e-2,
    )


@on_ranks(1, 3)
def test_through_two_operations_in_any_order() -> None:
    x, z = (torch.full((3, 2), float(hvd.rank()), requires_grad=True) for _ in range(2))
    if hvd.rank() == 0:
        loss = hvd.allreduce(x, op=hvd.Sum, name="x").sum() + hvd.allreduce(z, op=hvd.Sum, name="z").sum() * 2
    else:
        handle = hvd.allreduce_async(z.detach(), op=hvd.Sum, name="z")
        loss = hvd.allreduce(x, op=hvd.Sum, name="x").sum()
        hvd.synchronize(handle)
    if hvd.rank() == 0:
        # The gradient of z is asked for by this rank alone; the others answer with an operation of its name.
        loss.backward()
        torch.testing.assert_close(z.grad, torch.full((3, 2), 2.0 + 5.0 * (hvd.size() - 1)))
    else:
        pending = hvd.allreduce_async(torch.full((3, 2), 5.0), op=hvd.Sum, name="z.gradient")
        loss.backward()
        hvd.synchronize(pending)
    torch.testing.assert_close(x.grad, torch.full((3, 2), float(hvd.size())))


@on_ranks(1, 3)
def test_only_where_it_is_wanted() -> None:
    own = torch.ones(hvd.size(), requires_grad=True)
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(own)).requires_grad
    assert not hvd.synchronize(hvd.grouped_allgather_async([own]))[0].requires_grad
    assert not hvd.synchronize(hvd.reducescatter_async(own)).requires_grad
    assert not hvd.synchronize(hvd.alltoall_async(own)).requires_grad
    with torch.no_grad():
        assert not hvd.broadcast(own, 0).requires_grad
        assert not hvd.alltoall(own).requires_grad


@on_ranks(1, 3)
def test_not_where_it_is_undefined() -> None:
    own = torch.ones(hvd.size(), requires_grad=True)
    for call, op in [(hvd.allreduce, hvd.Max), (hvd.allreduce, hvd.Adasum), (hvd.reducescatter, hvd.Product)]:
        with pytest.raises(NotImplementedError, match=f"op=Average and op=Sum only, not for op={op.name.capitalize()}"):
            call(own, op=op).sum().backward()


@on_ranks(1, 3)
def test_after_a_rank_has_joined() -> None:
    """The last rank is out of data: the others' gradients are those without it."""
    size, left = hvd.size(), hvd.size() - 1
    if hvd.rank() == left:
        hvd.join()
        return
    own = hvd.rank()
    rows = 2 * size
    inputs = [[numbers(rank, rows, 2)] for rank in range(left)]
    cases: list[tuple[Any, Any]] = [
        (lambda g: [hvd.allreduce(g[0])], lambda gs: [[sum(g[0] for g in gs) / left]] * left),
        (lambda g: [hvd.allgather(g[0])], lambda gs: [[torch.cat([g[0] for g in gs])]] * left),
        (
            lambda g: [hvd.alltoall(g[0])],
            lambda gs: [[torch.cat([g[0][2 * rank : 2 * rank + 2] for g in gs])] for rank in range(left)],
        ),
        (
            lambda g: [hvd.reducescatter(g[0])],
            lambda gs: [[(sum(g[0] for g in gs) / left)[2 * rank : 2 * rank + 2]] for rank in range(left)],
        ),
    ]
    for call, model in cases:
        check(call, model, inputs, own)
    hvd.join()
