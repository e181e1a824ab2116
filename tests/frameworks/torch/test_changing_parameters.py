"""Optimizers whose parameters change: wrapped again, added, replaced, unfrozen, converted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from horovodish.errors import UnsupportedTensorError
from support.leaves import backward, check, leaf, mean, own, total, wrapped
from support.on_ranks import on_ranks

around_backward = on_ranks(3, (2, "fusion_threshold_mb=0"))


@around_backward
def test_a_parameter_wrapped_again() -> None:
    p, q = leaf(), leaf()
    old = wrapped([p, q], op=hvd.Sum)
    backward([p, q], own())
    old.step()
    new = wrapped([p], op=hvd.Sum)
    for optimizer in (new, old):
        optimizer.zero_grad()
    backward([p, q], own())
    check(p, total())
    check(q, total())
    new.step()
    old.step()
    del new, old, optimizer
    p.grad = None
    backward([p], own())
    check(p, own())


@around_backward
def test_later_parameters() -> None:
    p, q = leaf(), leaf()
    optimizer = wrapped([("p", p)])
    backward([p], own())
    optimizer.step()
    optimizer.add_param_group({"params": [q], "lr": 2.0})
    for step in range(2):
        optimizer.zero_grad()
        backward([p, q], own(step))
        check(p, mean(step))
        check(q, mean(step))
        optimizer.step()


@around_backward
def test_parameters_that_the_script_replaces() -> None:
    """As scripts do that grow a layer, append a head's parameters, or begin anew with other groups."""
    for op, expected in ((hvd.Average, mean), (hvd.Sum, total)):
        for zeroes in (True, False):
            replace_parameters(op, expected, zeroes)


def replace_parameters(op: hvd.ReduceOp, expected: Callable[[int], float], zeroes: bool) -> None:
    kept, old, larger, head = leaf(), leaf(), nn.Parameter(torch.zeros(2, 3)), leaf()
    optimizer = wrapped([("kept", kept), ("old", old)], op=op)

    def train(parameters: list[torch.Tensor], step: int) -> None:
        if zeroes:
            optimizer.zero_grad()
            backward(parameters, own(step))
        else:
            for parameter in parameters:
                parameter.grad = None
            backward(parameters, own(step))
            optimizer.synchronize()  # where all parameters are new, step() reduces
        for parameter in parameters:
            check(parameter, expected(step))
        optimizer.step()

    train([kept, old], 0)
    optimizer.param_groups[0]["params"][1] = larger
    train([kept, larger], 1)
    optimizer.param_groups[0]["params"].append(head)
    train([kept, larger, head], 2)
    old.grad = None
    backward([old], own())
    check(old, own())
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": [head, old]})
    train([head, old], 3)
    optimizer.param_groups[0]["params"][:] = [larger]
    train([larger], 4)


@around_backward
def test_a_parameter_wrapped_again_stays_there_when_others_change() -> None:
    p, q, late = leaf(), leaf(), leaf()
    old = wrapped([p, q], op=hvd.Sum)
    new = wrapped([p])
    old.param_groups[0]["params"].append(late)
    for step in range(2):
        for optimizer in (old, new):
            optimizer.zero_grad()
        backward([p, q, late], own(step))
        check(p, mean(step))
        check(q, total(step))
        check(late, total(step))


@on_ranks(2)
def test_a_new_parameter_that_cannot_be_reduced_is_refused_every_time() -> None:
    p = leaf()
    optimizer = wrapped([p])
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn)))
    for _ in range(2):
        with pytest.raises(UnsupportedTensorError, match=r"group0\.1"):
            backward([p], own())
    del optimizer.param_groups[0]["params"][1]
    optimizer.zero_grad()
    backward([p], own())
    check(p, mean())


@around_backward
def test_unfrozen_parameters() -> None:
    p, q = leaf(), leaf()
    q.requires_grad_(False)
    optimizer = wrapped([p, q])
    for step in range(4):
        if step == 2:
            q.requires_grad_(True)
        optimizer.zero_grad()
        backward([p, q], own(step))
        check(p, mean(step))
        if step >= 2:
            check(q, mean(step))
        optimizer.step()


@pytest.mark.soak
@around_backward
def test_a_converted_model() -> None:
    torch.manual_seed(0)
    for passes in (0, 2):
        model = nn.Linear(3, 4)
        optimizer = wrapped(model.named_parameters())
        for _ in range(passes):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        model.double()
        with pytest.raises(UnsupportedTensorError, match=r"torch.float64 of shape .* planned for torch.float32"):
            model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        optimizer.zero_grad()
