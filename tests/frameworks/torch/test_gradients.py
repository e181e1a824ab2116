"""What `p.grad` is after `backward()` and `step()`: every op, windows, several backwards, missing gradients."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from horovodish.errors import MismatchError
from support.leaves import backward, check, leaf, mean, own, total, wrapped
from support.on_ranks import on_ranks


@on_ranks(2, 3, (3, "mpi_ring"))
def test_backward_ends_with_reduced_gradients() -> None:
    p, q = leaf(), leaf()
    optimizer = wrapped([("p", p), ("q", q)])
    for step in range(3):
        optimizer.zero_grad()
        backward([p, q], own(step))
        check(p, mean(step))
        check(q, mean(step))
        p.data.zero_()
        optimizer.step()
        torch.testing.assert_close(p.data, torch.full((3,), -mean(step)))


@on_ranks(2, 3, (3, "mpi_ring"))
def test_every_op() -> None:
    largest, smallest = 2.0 ** (hvd.size() - 1), 1.0
    product = 2.0 ** sum(range(hvd.size()))
    for op, expected in [(hvd.Sum, total()), (hvd.Min, smallest), (hvd.Max, largest), (hvd.Product, product)]:
        p = leaf()
        optimizer = wrapped([p], op=op)
        for _ in range(2):
            optimizer.zero_grad()
            backward([p], own())
            check(p, expected)
            optimizer.step()


@on_ranks(2, 3, (3, "mpi_ring"))
def test_clipping_needs_no_ritual() -> None:
    p = leaf()
    optimizer = wrapped([p])
    for step in range(2):
        optimizer.zero_grad()
        backward([p], own(step) * 100)
        norm = torch.nn.utils.clip_grad_norm_([p], 1.0)
        torch.testing.assert_close(norm.item(), mean(step) * 100 * 3**0.5)
        before = p.detach().clone()
        optimizer.step()
        torch.testing.assert_close((before - p).norm().item(), 1.0)


@on_ranks(2, 3, (3, "mpi_ring"))
def test_the_ritual_still_works() -> None:
    p = leaf()
    optimizer = wrapped([p], backward_passes_per_step=2)
    optimizer.zero_grad()
    backward([p], own())
    check(p, own())
    optimizer.synchronize()
    check(p, mean())
    optimizer.synchronize()
    p.grad.mul_(2)
    with optimizer.skip_synchronize():
        optimizer.step()
    torch.testing.assert_close(p.data, torch.full((3,), -2 * mean()))


@on_ranks(2, 3, (3, "mpi_ring"))
def test_step_without_backward() -> None:
    p = leaf()
    optimizer = wrapped([p], op=hvd.Sum)
    p.grad = torch.full((3,), own())
    optimizer.step()
    check(p, total())
    # Only the first rank has a backward; the others meet it in step().
    p, q = leaf(), leaf()
    optimizer = wrapped([p, q], op=hvd.Sum)
    if hvd.rank() == 0:
        backward([p], 5.0)
    optimizer.step()
    check(p, 5.0)
    assert q.grad is None
    backward([p], own())
    check(p, 5.0 + total())


@on_ranks(2, 3, (3, "mpi_ring"))
def test_two_backwards_in_a_step() -> None:
    for op, one, two in [
        (hvd.Average, mean(), mean(1)),
        (hvd.Sum, total(), total(1)),
        (hvd.Max, 2.0 ** (hvd.size() - 1), 2.0 ** (hvd.size() + 1)),
    ]:
        p, q = leaf(), leaf()
        optimizer = wrapped([p, q], op=op)
        for _ in range(2):
            optimizer.zero_grad()
            backward([p, q], own())
            backward([p], own(1))
            check(p, one + two)
            check(q, one)
            optimizer.step()
            check(p, one + two)


@on_ranks(2, 3, (3, "mpi_ring"))
def test_gradients_that_are_never_zeroed() -> None:
    for op, expected in [(hvd.Average, mean()), (hvd.Sum, total())]:
        p = leaf()
        optimizer = wrapped([p], op=op)
        for step in range(1, 4):
            backward([p], own())
            check(p, step * expected)
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        backward([p], own())
        check(p, expected)
        # The gradient of another computation is not this one's business.
        (other,) = torch.autograd.grad((p * own()).sum(), p)
        assert torch.equal(other, torch.full((3,), own()))
        check(p, expected)


@on_ranks(2, 3, (3, "mpi_ring"))
def test_windows() -> None:
    for op, expected in [(hvd.Average, mean(0) + mean(1) + mean(2)), (hvd.Sum, total(0) + total(1) + total(2))]:
        p = leaf()
        optimizer = wrapped([p], op=op, backward_passes_per_step=3)
        for _ in range(3):
            optimizer.zero_grad()
            for step in range(3):
                check(p, own(0) + (own(1) if step == 2 else 0)) if step else None
                backward([p], own(step))
            check(p, expected)
            optimizer.step()
            check(p, expected)
        # Without zero_grad, windows add up.
        for step in range(3):
            backward([p], own(step))
        check(p, 2 * expected)


@on_ranks(2, 3, (3, "mpi_ring"))
def test_partial_windows() -> None:
    for op, scale in [(hvd.Average, 1 / hvd.size()), (hvd.Sum, 1.0)]:
        p = leaf()
        optimizer = wrapped([p], op=op, backward_passes_per_step=4)
        for passes in [4, 2, 4, 1, 3, 4]:
            optimizer.zero_grad()
            for step in range(passes):
                backward([p], own(step))
            optimizer.step()
            check(p, scale * sum(total(step) for step in range(passes)))
        # More backwards than the window has: the rest is reduced by step().
        optimizer.zero_grad()
        for step in range(6):
            backward([p], own(step))
        optimizer.step()
        check(p, scale * sum(total(step) for step in range(6)))


@on_ranks(2, 3, (3, "mpi_ring"))
def test_changing_the_window() -> None:
    p = leaf()
    optimizer = wrapped([p])
    optimizer.set_backward_passes_per_step(2)
    backward([p], own())
    check(p, own())
    backward([p], own(1))
    check(p, mean(0) + mean(1))
    with pytest.raises(ValueError, match="must be a whole number"):
        optimizer.set_backward_passes_per_step(0)


@on_ranks(2, 3, (3, "mpi_ring"))
def test_missing_gradients() -> None:
    last = hvd.size() - 1
    for op, scale in [(hvd.Average, 1 / hvd.size()), (hvd.Sum, 1.0)]:
        everywhere, nowhere, on_last, on_first = leaf(), leaf(1.0), leaf(), leaf()
        optimizer = torch.optim.SGD([everywhere, nowhere, on_last, on_first], lr=1.0, momentum=0.9, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, op=op)
        for step in range(3):
            optimizer.zero_grad()
            used = [everywhere] + [on_last] * (hvd.rank() == last) + [on_first] * (hvd.rank() == 0 and step != 1)
            backward(used, own())
            check(everywhere, scale * total())
            check(on_last, scale * 2.0**last)
            if step == 1:
                assert on_first.grad is None
            else:
                check(on_first, scale * 1.0)
            assert nowhere.grad is None
            optimizer.step()
        assert torch.equal(nowhere.data, torch.ones(3)), "weight decay has moved a parameter that has no gradient"
        assert nowhere not in optimizer.state


@on_ranks(2, 3, (3, "mpi_ring"))
def test_missing_gradients_are_not_reduced_again() -> None:
    for op in [hvd.Average, hvd.Sum]:
        p, q = leaf(), leaf()
        optimizer = wrapped([p, q], op=op)
        backward([p, q], own())
        expected = p.grad.clone()
        for _ in range(3):
            backward([q], own())
            assert torch.equal(p.grad, expected) or op is hvd.Average
            torch.testing.assert_close(p.grad, expected)
        optimizer.step()


class Halved:
    """A compression of the user's own, with another shape, and with context."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor / 2).flatten().double(), (tensor.shape, tensor.dtype)

    def decompress(self, tensor: torch.Tensor, context: Any) -> torch.Tensor:
        shape, dtype = context
        return (tensor * 2).reshape(shape).to(dtype)


@on_ranks(2, 3, (3, "mpi_ring"))
def test_compression() -> None:
    for compress, tolerance in [(hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2), (Halved(), 1e-6)]:
        used, partly, unused = (nn.Parameter(torch.zeros(5, 3)) for _ in range(3))
        optimizer = wrapped([used, partly, unused], compression=compress)
        for step in range(2):
            optimizer.zero_grad()
            backward([used] + [partly] * (hvd.rank() == 0), own(step) / 3)
            assert used.grad.dtype == torch.float32
            torch.testing.assert_close(used.grad, torch.full((5, 3), mean(step) / 3), rtol=tolerance, atol=0)
            expected = 2.0 ** (2 * step) / 3 / hvd.size()
            torch.testing.assert_close(partly.grad, torch.full((5, 3), expected), rtol=tolerance, atol=0)
            assert unused.grad is None
            optimizer.step()


@on_ranks(2, 3, (3, "mpi_ring"))
def test_predivide() -> None:
    p = leaf()
    optimizer = wrapped([p], gradient_predivide_factor=4.0)
    backward([p], own())
    check(p, mean())
    optimizer.step()
    q = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = wrapped([q], gradient_predivide_factor=float(hvd.size()))
    backward([q], 40000.0)
    torch.testing.assert_close(q.grad.float(), torch.full((2,), 40000.0), rtol=1e-3, atol=0)


@on_ranks(2, 3, (3, "mpi_ring"))
def test_other_dtypes() -> None:
    parameters = [
        nn.Parameter(torch.zeros(4, dtype=dtype))
        for dtype in [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float32]
    ]
    optimizer = wrapped(parameters)
    for step in range(2):
        optimizer.zero_grad()
        sum((parameter * own(step)).sum().double() for parameter in parameters).backward()
        for parameter in parameters:
            expected = torch.full((4,), mean(step), dtype=parameter.dtype)
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-2, atol=0)


@on_ranks(2, 3, (3, "mpi_ring"))
def test_bits_do_not_depend_on_who_is_late() -> None:
    """Every round has other delays while backward runs, and lets the ranks finish gradients in another order."""
    timing = random.Random(hvd.rank())
    rounds = []
    for _ in range(4):
        parameters = [leaf_of(1000 + i) for i in range(6)]
        optimizer = wrapped(parameters, groups=3)
        for parameter in parameters:
            parameter.register_hook(lambda _: time.sleep(timing.random() * 0.002))
        for step in range(4):
            optimizer.zero_grad()
            values = torch.Generator().manual_seed(100 * step + hvd.rank())
            losses = [(p * torch.randn(p.shape, generator=values)).sum() for p in parameters]
            timing.shuffle(losses)
            sum(losses).backward()  # type: ignore[union-attr]
            optimizer.step()
        rounds.append(torch.cat([parameter.detach() for parameter in parameters]))
    assert all(torch.equal(rounds[0], other) for other in rounds)


def leaf_of(length: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(length))


@on_ranks(3)
def test_a_layer_that_one_rank_has_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(hvd.rank() != 1)
    optimizer = wrapped(model.named_parameters())
    remedy = (
        r"the ranks' models differ: rank 0 trains 4 parameters, rank 1 trains 2: only rank 0 has 0.weight, 0.bias\."
    )
    with pytest.raises(MismatchError, match=remedy):
        model(torch.ones(1, 2)).sum().backward()
    del optimizer


@on_ranks(2)
def test_gradients_that_are_set_by_hand() -> None:
    for op, scale in ((hvd.Average, 1 / hvd.size()), (hvd.Sum, 1.0)):
        p = leaf()
        optimizer = wrapped([p], op=op)
        for step in range(3):
            p.grad = torch.full((3,), own(step))
            optimizer.step()
            check(p, scale * total(step))


@on_ranks(2)
def test_gradients_that_are_set_by_hand_after_zero_grad() -> None:
    """A step may be left out, or a backward serve for nothing but a log."""
    p = leaf()
    optimizer = wrapped([p])
    for step in range(2):
        backward([p], own(step))
        check(p, mean(step))
        optimizer.zero_grad()
        p.grad = torch.full((3,), own(step + 1))
        optimizer.step()
        check(p, mean(step + 1))
        optimizer.zero_grad()


@on_ranks(2)
def test_gradients_that_are_made_of_reduced_ones() -> None:
    """One backward for each task, and a sum that is projected, as in gradient surgery."""
    for op, expected in ((hvd.Average, mean), (hvd.Sum, total)):
        p = leaf()
        optimizer = wrapped([p], op=op)
        for step in range(2):
            parts = []
            for task in range(2):
                optimizer.zero_grad()
                backward([p], own(step + task))
                parts.append(p.grad.clone())
            p.grad = parts[0] - parts[1]
            optimizer.step()
            check(p, expected(step) - expected(step + 1))


@on_ranks(2)
def test_gradients_that_are_set_by_hand_in_place() -> None:
    for op, expected in ((hvd.Average, mean), (hvd.Sum, total)):
        p, q = leaf(), leaf()
        optimizer = wrapped([p, q], op=op)
        for step in range(3):
            for parameter in (p, q):
                if parameter.grad is None:
                    parameter.grad = torch.zeros(3)
                parameter.grad.fill_(own(step))
            optimizer.step()
            check(p, expected(step))
            check(q, expected(step))
        optimizer.step()  # with what is left of the last step
        check(p, expected(2))
