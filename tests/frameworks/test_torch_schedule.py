"""The learning rate rises linearly to a multiple of itself, as one of torch's schedulers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, SequentialLR

import horovodish.torch as hvd
from horovodish.errors import NotInitializedError
from support.ranks import run_ranks


def an_optimizer() -> torch.optim.SGD:
    usual, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    return torch.optim.SGD([{"params": [usual]}, {"params": [other], "lr": 1.0}], lr=0.1)


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def test_it_rises_and_stays() -> None:
    optimizer = an_optimizer()
    scheduler = hvd.LinearScalingWarmup(optimizer, warmup_steps=4, factor=3)
    seen = [rates(optimizer)]
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        seen.append(rates(optimizer))
    assert seen == [pytest.approx([0.1 * factor, factor]) for factor in (1, 1.5, 2, 2.5, 3, 3, 3)]
    assert scheduler.get_last_lr() == rates(optimizer)


def test_no_warm_up() -> None:
    optimizer = an_optimizer()
    hvd.LinearScalingWarmup(optimizer, warmup_steps=0, factor=8)
    assert rates(optimizer) == pytest.approx([0.8, 8.0])


def test_a_checkpoint_goes_on() -> None:
    first, second = an_optimizer(), an_optimizer()
    scheduler = hvd.LinearScalingWarmup(first, warmup_steps=4, factor=3)
    resumed = hvd.LinearScalingWarmup(second, warmup_steps=4, factor=3)
    for _ in range(2):
        first.step()
        scheduler.step()
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for optimizer, its in ((first, scheduler), (second, resumed)):
        optimizer.step()
        its.step()
    assert rates(first) == rates(second) == pytest.approx([0.25, 2.5])


def test_another_schedule_follows() -> None:
    optimizer = an_optimizer()
    warmup = hvd.LinearScalingWarmup(optimizer, warmup_steps=2, factor=2)
    scheduler = SequentialLR(optimizer, [warmup, ExponentialLR(optimizer, 0.5)], milestones=[3])
    seen = []
    for _ in range(5):
        optimizer.step()
        with warnings.catch_warnings():  # SequentialLR of torch warns of itself
            warnings.simplefilter("ignore", UserWarning)
            scheduler.step()
        seen.append(rates(optimizer)[0])
    assert seen[:2] == pytest.approx([0.15, 0.2])
    assert seen[3] == pytest.approx(seen[2] / 2)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps=-1 is negative"):
        hvd.LinearScalingWarmup(an_optimizer(), -1, factor=2)
    with pytest.raises(ValueError, match="factor=0 is not positive"):
        hvd.LinearScalingWarmup(an_optimizer(), 1, factor=0)
    with pytest.raises(NotInitializedError):
        hvd.LinearScalingWarmup(an_optimizer(), 1)


def scale_by_the_ranks() -> list[float]:
    hvd.init()
    optimizer = an_optimizer()
    wrapped = hvd.DistributedOptimizer(optimizer)
    scheduler = hvd.LinearScalingWarmup(wrapped, warmup_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.step()
        scheduler.step()
    return rates(wrapped)


def test_the_number_of_ranks() -> None:
    assert run_ranks(scale_by_the_ranks, 3) == [pytest.approx([0.3, 3.0])] * 3
