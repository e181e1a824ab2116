"""Optimizers whose parameters change: wrapped again, added, replaced, unfrozen, converted."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from horovodish.errors import MismatchError, UnsupportedTensorError
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


@on_ranks(2)
def test_new_plans_go_on_to_count_steps_for_comparisons() -> None:
    """The ranks part after the second step. The plan changes often, and the ranks are warned once."""
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.1))
    said = []
    for step in range(1, 10):
        if step in (3, 6, 9):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.zero_grad()
            torch.stack([each.sum() for group in optimizer.param_groups for each in group["params"]]).sum().backward()
            optimizer.step()
            hvd.barrier()
        said += [str(each.message) for each in caught if "different parameters" in str(each.message)]
        if step == 4:
            with torch.no_grad():
                p.add_(hvd.rank())
    if hvd.rank() == 0:
        assert len(said) == 1, said
        assert said[0].startswith("the ranks train different parameters at step 6: parameter 'group0.0' differs"), said


@on_ranks(2)
def test_strides_of_dimensions_of_length_1() -> None:
    """They mean nothing, so the ranks may have different ones. A memory order that differs is named."""
    ones = torch.ones(4, 2, 1, 3)
    channels_last = ones.to(memory_format=torch.channels_last)
    same = nn.Parameter(ones.as_strided((4, 2, 1, 3), (6, 1, 1, 2)) if hvd.rank() else channels_last)
    assert same.stride() == ((6, 1, 1, 2) if hvd.rank() else (6, 1, 6, 2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([same], lr=1.0))
    (same.sum() * (1 + hvd.rank())).backward()
    optimizer.step()
    assert same.unique().tolist() == [-0.5]
    other = nn.Parameter(ones.contiguous() if hvd.rank() else channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([other], lr=1.0))
    with pytest.raises(MismatchError, match="memory format with the dimensions in the order"):
        other.sum().backward()
