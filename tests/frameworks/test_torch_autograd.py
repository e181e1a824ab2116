"""Gradients flow through the collectives: those of the sum of all ranks' losses."""

from __future__ import annotations

import pytest
import torch

import horovodish.torch as hvd
from support.ranks import run_ranks


def all_gradients() -> None:
    hvd.init()
    through_allreduce()
    through_compression_and_factors()
    through_allgather()
    through_broadcast()
    through_two_operations_in_any_order()
    the_second_derivative()
    only_where_it_is_wanted()
    not_where_it_is_undefined()


def weights(rank: int) -> torch.Tensor:
    """What a rank's loss multiplies the result with: different on every rank."""
    return torch.arange(1.0, 7.0).reshape(3, 2) * (rank + 1)


def total_weights() -> torch.Tensor:
    return torch.stack([weights(rank) for rank in range(hvd.size())]).sum(0)


def leaf() -> torch.Tensor:
    return torch.full((3, 2), float(hvd.rank()), requires_grad=True)


def through_allreduce() -> None:
    for op, share in [(hvd.Sum, 1), (hvd.Average, 1 / hvd.size())]:
        x = leaf()
        (hvd.allreduce(x, op=op) * weights(hvd.rank())).sum().backward()
        torch.testing.assert_close(x.grad, total_weights() * share)


def through_compression_and_factors() -> None:
    x = leaf()
    y = hvd.allreduce(
        x, op=hvd.Sum, compression=hvd.Compression.fp16, prescale_factor=0.5, postscale_factor=3.0, name="scaled"
    )
    (y * weights(hvd.rank())).sum().backward()
    torch.testing.assert_close(x.grad, total_weights() * 1.5, rtol=1e-2, atol=1e-2)


def through_allgather() -> None:
    x = torch.ones(hvd.rank() + 1, 2, requires_grad=True)
    y = hvd.allgather(x)
    rows = torch.arange(1.0, len(y) + 1).reshape(-1, 1)
    (y * rows * (hvd.rank() + 1)).sum().backward()
    begin = sum(range(hvd.rank() + 1))
    own_rows = rows[begin : begin + hvd.rank() + 1].expand(-1, 2)
    torch.testing.assert_close(x.grad, own_rows * sum(range(1, hvd.size() + 1)))
    scalar = torch.tensor(2.0, requires_grad=True)
    (hvd.allgather(scalar) * rows[: hvd.size(), 0]).sum().backward()
    torch.testing.assert_close(scalar.grad, rows[hvd.rank(), 0] * hvd.size())


def through_broadcast() -> None:
    x = leaf()
    root = hvd.size() - 1
    (hvd.broadcast(x, root) * weights(hvd.rank())).sum().backward()
    expected = total_weights() if hvd.rank() == root else torch.zeros(3, 2)
    torch.testing.assert_close(x.grad, expected)


def through_two_operations_in_any_order() -> None:
    x, z = leaf(), leaf()
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


def the_second_derivative() -> None:
    x = torch.tensor([2.0], requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(x**3, op=hvd.Sum).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first.detach(), torch.tensor([12.0 * hvd.size()]))
    torch.testing.assert_close(second, torch.tensor([12.0 * hvd.size()]))


def only_where_it_is_wanted() -> None:
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    assert not hvd.synchronize(hvd.allreduce_async(leaf())).requires_grad
    with torch.no_grad():
        assert not hvd.broadcast(leaf(), 0).requires_grad


def not_where_it_is_undefined() -> None:
    loss = hvd.allreduce(leaf(), op=hvd.Max).sum()
    with pytest.raises(NotImplementedError, match="op=Average and op=Sum only, not for op=Max"):
        loss.backward()


@pytest.mark.parametrize("np", [2, 3])
def test_autograd(np: int) -> None:
    run_ranks(all_gradients, np, timeout=90)
