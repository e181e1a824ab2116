"""Closures of `step()`, and what counts as a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import horovodish.torch as hvd
from horovodish.runtime import basics
from support.leaves import backward, check, leaf, mean, own, total, wrapped
from support.on_ranks import on_ranks

around_backward = on_ranks(3, (2, "fusion_threshold_mb=0"))


@around_backward
def test_closures() -> None:
    p = leaf()
    optimizer = wrapped([p], backward_passes_per_step=2)

    def closure() -> float:
        optimizer.zero_grad()
        backward([p], own())
        return 1.5

    for step in range(1, 3):
        assert optimizer.step(closure) == 1.5
        check(p, mean())
        torch.testing.assert_close(p.data, torch.full((3,), -step * mean()))
    backward([p], own())
    check(p, mean() + own())
    optimizer.step()


class CallsTwice(torch.optim.SGD):
    """As line searches and sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure=closure)


@around_backward
def test_closures_whose_gradients_no_backward_reduces() -> None:
    for op, expected in ((hvd.Average, mean), (hvd.Sum, total)):
        for kind in (torch.optim.SGD, CallsTwice):
            step_with_closures(kind, op, expected)


def step_with_closures(kind: type[torch.optim.SGD], op: hvd.ReduceOp, expected: Callable[[int], float]) -> None:
    p = leaf()
    optimizer: Any = hvd.DistributedOptimizer(kind([p], lr=1.0), op=op)

    def by_hand() -> float:
        p.grad = torch.full((3,), own())
        return 1.5

    def suspended() -> float:
        optimizer.zero_grad()
        with optimizer.no_sync():
            backward([p], own(1))
        return 2.5

    assert optimizer.step(by_hand) == 1.5
    check(p, expected(0))
    assert optimizer.step(closure=suspended) == 2.5
    check(p, expected(1))
    optimizer.zero_grad()
    with optimizer.no_sync():
        backward([p], own(2))
    assert optimizer.step(lambda: 3.5) == 3.5
    check(p, expected(2))
    steps = 2 if kind is CallsTwice else 1
    torch.testing.assert_close(p.data, torch.full((3,), -steps * sum(expected(step) for step in range(3))))


class LooksTwice(torch.optim.SGD):
    """Its step evaluates the closure once more."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@on_ranks(2)
def test_what_counts_as_a_step() -> None:
    """A call of `step()`, whatever is reduced before it, and however often."""
    steps = basics.engine().steps
    p = leaf()
    optimizer = wrapped([p], backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        backward([p], 1.0)
        assert steps() == step
        backward([p], 1.0)
        assert steps() == step + 1
        optimizer.step()
    p = leaf()
    twice: Any = hvd.DistributedOptimizer(LooksTwice([p], lr=1.0))

    def closure() -> float:
        twice.zero_grad()
        backward([p], own())
        return 1.5

    for _ in range(2):
        twice.step(closure)
    assert steps() == 5
    adasum = wrapped([q := leaf()], op=hvd.Adasum)
    backward([q], 1.0)
    assert steps() == 5
    adasum.step()
    assert steps() == 6
