"""DistributedOptimizer with a codec: error feedback is needed, and small tensors travel as they are."""

from __future__ import annotations

from typing import Any

import torch

import horovodish.torch as hvd
from support.on_ranks import on_ranks

STEPS = 150


def loss_after_training(compression: Any) -> float:
    """Fits a matrix whose columns have very different sizes, from other samples on each rank."""
    target = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -3, 32)
    weight, bias = torch.nn.Parameter(torch.zeros(32, 32)), torch.nn.Parameter(torch.zeros(32))
    named = [("weight", weight), ("bias", bias)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, bias], lr=0.1), named, compression=compression)
    samples = torch.randn(256, 32, generator=torch.Generator().manual_seed(2 + hvd.rank()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (samples @ (weight - target) + bias).pow(2).sum(1).mean().backward()
        optimizer.step()
    assert torch.equal(weight, hvd.broadcast(weight.detach(), root_rank=0))
    return float((weight.detach() - target).pow(2).sum() / target.pow(2).sum())


@on_ranks((2, "mpi_ring"))
def test_one_bit_trains_with_error_feedback_and_not_without() -> None:
    onebit = hvd.Compression.onebit
    exact, small = loss_after_training(hvd.Compression.none), loss_after_training(onebit)
    assert exact == small  # by default tensors as small as these travel as they are
    with_feedback = loss_after_training(onebit(where=lambda name, shape: name == "weight"))
    without = loss_after_training(onebit(where=lambda name, shape: name == "weight", error_feedback=False))
    assert exact < 1e-6
    assert with_feedback < 0.01 < 0.04 < without, (with_feedback, without)
