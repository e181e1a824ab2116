"""LARS and LAMB, of the library that the guide names: N ranks train as one process with the joined batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import horovodish.torch as hvd
from support.ranks import run_ranks

STEPS, BATCH = 5, 4


def optimizers() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    import pytorch_optimizer

    return {
        "LARS": lambda parameters: pytorch_optimizer.LARS(parameters, lr=0.1),
        "LAMB": lambda parameters: pytorch_optimizer.Lamb(parameters, lr=0.01),
    }


def weights_after_training(name: str, rank: int, ranks: int, wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    data = torch.randn(STEPS, 2, BATCH, 6)  # of two ranks
    optimizer = wrap(optimizers()[name](model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = data[step, rank : rank + 1] if ranks == 2 else data[step]
        model(batch.reshape(-1, 6)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train() -> dict[str, list[torch.Tensor]]:
    hvd.init()
    return {name: weights_after_training(name, hvd.rank(), 2, hvd.DistributedOptimizer) for name in optimizers()}


def test_ranks_train_as_one_process() -> None:
    pytest.importorskip("pytorch_optimizer")
    results = run_ranks(train, 2)
    for name in optimizers():
        alone = weights_after_training(name, 0, 1, lambda optimizer: optimizer)
        for ours, other, expected in zip(results[0][name], results[1][name], alone, strict=True):
            assert torch.equal(ours, other)
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
