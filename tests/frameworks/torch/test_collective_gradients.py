"""The gradients of collectives under both values of `collective_gradients`, against their formulas."""

from __future__ import annotations

import pytest
import torch

import horovodish.torch as hvd
from support.collective_gradients import SETTINGS, cases, loss
from support.ranks import run_ranks


def every_gradient() -> None:
    with pytest.MonkeyPatch.context() as environment:
        for setting in SETTINGS:
            environment.setenv("HOROVODISH_COLLECTIVE_GRADIENTS", setting)
            hvd.init()
            for case in cases(hvd.size(), setting):
                own = [torch.ones(case.shape, requires_grad=True) for _ in case.gradients(0)]
                loss(case, hvd, own, lambda result, weights: (result * torch.from_numpy(weights)).sum()).backward()
                for tensor, expected in zip(own, case.gradients(hvd.rank()), strict=True):
                    told = f"{case.label}, {setting}"
                    torch.testing.assert_close(tensor.grad.numpy(), expected, msg=told)
            hvd.shutdown()


@pytest.mark.shows("Gradients of collectives")
@pytest.mark.parametrize("np", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_gradients_follow_the_setting(np: int) -> None:
    run_ranks(every_gradient, np)
