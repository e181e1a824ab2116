"""N ranks with batches of B train to the same weights as one process with batches of N x B, and to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from support.ranks import run_ranks

STEPS = 12
BATCH = 4
# Sums of float32 in another order: a few units in the last place for each step, of weights of magnitude 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
# Adam divides by the root of the squared gradients, which for tiny gradients turns rounding into steps of the size lr.
ADAM_TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, float]]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True), TOLERANCE),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3), ADAM_TOLERANCE),
    "AdamW foreach": (lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True), ADAM_TOLERANCE),
    "AdamW fused": (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), ADAM_TOLERANCE),
}


class Shared(nn.Module):
    """A model whose first and last layer are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 5, bias=False)
        self.inner = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.embedding(x)).tanh() @ self.embedding.weight


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))


def channels_last() -> nn.Module:
    layers = [nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 4, (1, 2)), nn.Tanh(), nn.Conv2d(4, 3, (1, 2)), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(3, 6)).to(memory_format=torch.channels_last)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "shared": Shared, "channels_last": channels_last}


def batch(step: int, ranks: range) -> tuple[torch.Tensor, torch.Tensor]:
    """The examples of some ranks in one step."""
    generators = [torch.Generator().manual_seed(1000 * step + rank) for rank in ranks]
    inputs, targets = zip(*[torch.randn(2, BATCH, 6, generator=generator) for generator in generators], strict=True)
    return torch.cat(inputs), torch.cat(targets)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: range) -> torch.Tensor:
    for step in range(STEPS):
        inputs, targets = batch(step, ranks)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def compare_everything() -> None:
    hvd.init()
    rank = hvd.rank()
    for model_name, make_model in MODELS.items():
        for optimizer_name, (make_optimizer, tolerance) in OPTIMIZERS.items():
            torch.manual_seed(7)
            alone = make_model()
            expected = train(alone, make_optimizer(alone.parameters()), range(hvd.size()))

            torch.manual_seed(100 + rank)
            model = make_model()
            optimizer = hvd.DistributedOptimizer(make_optimizer(model.parameters()), model.named_parameters())
            torch.manual_seed(7)
            start = make_model().state_dict() if rank == 0 else {}
            model.load_state_dict(start, strict=rank == 0)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            weights = train(model, optimizer, range(rank, rank + 1))

            case = f"{model_name}, {optimizer_name}"
            torch.testing.assert_close(weights, expected, **tolerance, msg=lambda text, case=case: f"{case}: {text}")
            of_all_ranks = hvd.allgather(weights.reshape(1, -1))
            assert torch.equal(of_all_ranks, weights.expand(hvd.size(), -1)), f"{case}: the ranks hold different bits"


@pytest.mark.parametrize("np", [2, 3])
def test_ranks_train_as_one_process(np: int) -> None:
    run_ranks(compare_everything, np, timeout=120)


def test_small_buckets_give_the_same() -> None:
    run_ranks(compare_everything, 2, timeout=120, env={"HOROVODISH_FUSION_THRESHOLD_MB": "0.0001"})


def test_over_mpi() -> None:
    run_ranks(compare_everything, 2, timeout=120, env={"HOROVODISH_PLANE": "mpi_ring"})
