"""DistributedOptimizer with PowerSGD: against a model of the paper's algorithm, and in what may go wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import horovodish.torch as hvd
from horovodish.errors import MismatchError
from support.approximated import MATRIX, SHAPE, Floats, follows_the_model
from support.on_ranks import on_ranks

powersgd = hvd.Compression.powersgd


def everything(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1


def wrapped(weight: torch.nn.Parameter, compression: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD([weight], lr=1.0)
    return hvd.DistributedOptimizer(optimizer, [("weight", weight)], compression=compression, **options)


def kept(optimizer: Any) -> Any:
    (kept,) = optimizer._reducer._low_rank._kept.values()
    return kept


@on_ranks(2, 3)
@pytest.mark.parametrize(("start", "passes", "op"), [(0, 1, hvd.Average), (3, 1, hvd.Average), (0, 2, hvd.Sum)])
def test_averages_follow_the_model(start: int, passes: int, op: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = wrapped(weight, powersgd(start=start, where=everything), backward_passes_per_step=passes, op=op)
    total = 1 if op is hvd.Average else hvd.size()

    def step(gradient: Floats) -> tuple[Any, Any]:
        optimizer.zero_grad()
        for _ in range(passes):
            (weight * torch.from_numpy(gradient) / passes / total).sum().backward()
        error = kept(optimizer).error.numpy() * total if optimizer._reducer._low_rank.chosen else np.zeros(MATRIX)
        return weight.grad, error

    follows_the_model(step, max(start, 1))


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_left_arrives_in_any_layout_and_plan(dtype: torch.dtype) -> None:
    """Beside it are a vector, which travels as it is, and parameters that make another plan in each step."""
    weight = torch.nn.Parameter(torch.zeros(8, 6, 3, 3, dtype=dtype).to(memory_format=torch.channels_last))
    bias = torch.nn.Parameter(torch.zeros(6))
    sgd, named = torch.optim.SGD([weight, bias], lr=1.0), [("weight", weight), ("bias", bias)]
    optimizer = hvd.DistributedOptimizer(sgd, named, compression=powersgd(where=everything))
    lost = torch.zeros(8, 6, 3, 3)
    for number in range(20):
        of_ranks = torch.randn(2, 8, 6, 3, 3, generator=torch.Generator().manual_seed(number)) * (number < 3)
        optimizer.zero_grad()
        ((weight * of_ranks[hvd.rank()].to(dtype)).sum() + (bias * (hvd.rank() + 1)).sum()).backward()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        assert weight.grad is not None and weight.grad.dtype is dtype and torch.equal(bias.grad, torch.full((6,), 1.5))
        assert weight.grad.is_contiguous(memory_format=torch.channels_last)
        lost += of_ranks.to(dtype).float().mean(0) - weight.grad.float()
        assert number != 1 or lost.abs().max() > 0.1
    assert lost.abs().max() < (1e-5 if dtype is torch.float32 else 0.05)


@on_ranks(2)
def test_ranks_without_a_gradient() -> None:
    weight = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = wrapped(weight, powersgd(where=everything))
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    for has in ([0, 1], [0, 1], [1], [], [0]):
        optimizer.zero_grad()
        before = kept(optimizer).error.sum() if optimizer._reducer._low_rank.chosen else None
        if hvd.rank() in has:
            (weight * values).sum().backward()
        optimizer.synchronize()
        assert (weight.grad is None) == (not has)
        if not has:
            assert kept(optimizer).error.sum() == before
    assert torch.equal(weight.grad, hvd.broadcast(weight.grad, root_rank=0))


@on_ranks(3)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_step_that_is_not_finite_on_one_rank_is_so_on_all_and_errors_stay(value: float) -> None:
    weight = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = wrapped(weight, powersgd(where=everything))
    for number in range(5):
        before = kept(optimizer) if number > 1 else None
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(hvd.rank()))
        if number == 3 and hvd.rank() == 1:
            gradient[1, 1, 1] = value
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        assert weight.grad.isnan().all() if number == 3 else weight.grad.isfinite().all()
        if number == 3:
            assert all(map(torch.equal, kept(optimizer), before))


@on_ranks(2)
def test_gradients_that_were_zero_travel_later() -> None:
    """A step with zeros leaves no direction, and the columns and rows in which one was searched first stay zero."""
    weight = torch.nn.Parameter(torch.zeros(40, 30))
    optimizer = wrapped(weight, powersgd(where=everything, error_feedback=False))
    gradient = torch.zeros(40, 30)
    for number in range(4):
        if number == 3:
            gradient[30:, 20:] = torch.ones(10, 10)
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
    torch.testing.assert_close(weight.grad, gradient)


@on_ranks(2)
def test_a_rank_that_comes_back_begins_with_the_others() -> None:
    weight = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = wrapped(weight, powersgd(start=4, where=everything))
    exact = []
    for number in range(8):
        if number == 2 and hvd.rank() == 1:
            hvd.join()
        if number in (2, 3) and hvd.rank() == 1:
            continue
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        shares = gradient, gradient / 2  # the other rank has joined
        exact.append(any(torch.allclose(weight.grad, share, atol=1e-5) for share in shares))
        if number == 3:
            hvd.join()
    assert exact == ([True] * 4 + [False] * 2 if hvd.rank() else [True] * 6 + [False] * 2)


@on_ranks(2)
@pytest.mark.parametrize("other", [{"rank": 3}, {"start": 5}, {"error_feedback": False}, {"where": None}])
def test_ranks_with_other_options_are_told(other: dict[str, Any]) -> None:
    weight = torch.nn.Parameter(torch.zeros(SHAPE))
    options = {"where": everything, **(other if hvd.rank() else {})}
    optimizer = wrapped(weight, powersgd(**options))
    text = r"compression= is Compression.powersgd\(2\) on rank 0, and Compression"
    if "where" in other:  # only what it chooses can be compared
        text = r"rank 0 has 'weight \(24, 3, 5\), Compression.powersgd\(2\), start=0"
    with pytest.raises(MismatchError, match=text):
        weight.sum().backward()
    optimizer.zero_grad()


@on_ranks(2)
def test_what_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(SHAPE))
    with pytest.raises(ValueError, match=r"powersgd\(0\): the rank must be a whole number, 1 or more"):
        powersgd(0)
    with pytest.raises(ValueError, match=r"powersgd\(4\) is for DistributedOptimizer; use Compression\.int8"):
        hvd.allreduce(weight, compression=powersgd(4))
    with pytest.raises(ValueError, match=r"powersgd\(2\) is not yet available with shard="):
        wrapped(weight, powersgd(), shard="states")
    with pytest.raises(ValueError, match=r"powersgd\(2\) needs op=Average or op=Sum"):
        wrapped(weight, powersgd(), op=hvd.Adasum)


def test_which_parameters_are_approximated() -> None:
    assert powersgd(2).matrix("", (256, 255)) is None  # 65280 elements
    assert powersgd(2).matrix("", (256, 256)) == (256, 256)
    assert powersgd(128).matrix("", (256, 256)) is None  # the factors have as many elements
    assert powersgd(2).matrix("", (65536,)) is None
    assert powersgd(2).matrix("", (128, 64, 3, 3)) == (128, 576)
    assert powersgd(2).matrix("", (3, 3, 64, 128)) == (576, 128)
    assert powersgd(2, where=lambda name, shape: name == "w").matrix("w", (9, 9)) == (9, 9)
