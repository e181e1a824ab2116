"""N ranks with batches of B train to the same weights as one process with batches of N x B, and to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import horovodish.torch as hvd
from support.on_ranks import on_ranks

STEPS = 12
BATCH = 4
# Sums of float32 in another order: a few units in the last place for each step, of weights of magnitude 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
# Adam divides by the root of the squared gradients, which turns the rounding of a gradient that should be zero, such as
# that of an attention's key bias, into a step of the size lr. An eps well above rounding keeps that small.
EPS = 1e-5
ADAM_TOLERANCE = {"rtol": 5e-5, "atol": 5e-6}

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, float]]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3, nesterov=True), TOLERANCE),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3, eps=EPS), ADAM_TOLERANCE),
    "AdamW foreach": (lambda p: torch.optim.AdamW(p, lr=1e-3, eps=EPS, foreach=True), ADAM_TOLERANCE),
    "AdamW fused": (lambda p: torch.optim.AdamW(p, lr=1e-3, eps=EPS, fused=True), ADAM_TOLERANCE),
}
# The others refuse sparse gradients.
SPARSE_OPTIMIZERS: dict[str, tuple[Make, dict[str, float]]] = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), TOLERANCE),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(p, lr=1e-3, eps=EPS), ADAM_TOLERANCE),
}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))


def cnn() -> nn.Module:
    """In channels-last format. Batch normalization trains its scale and shift, with statistics that stay as they are:

    those of a batch are of the rank's own examples, which no reduction of gradients can make those of all.
    """
    layers = [
        nn.Unflatten(1, (2, 1, 3)),
        nn.Conv2d(2, 4, (1, 2)),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Conv2d(4, 3, (1, 2)),
    ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, 6)).to(memory_format=torch.channels_last)
    model[2].eval()
    model[2].running_mean.normal_()
    model[2].running_var.uniform_(0.5, 2.0)
    return model


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.outer = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.block(self.inner(x.unflatten(1, (3, 2))))).flatten(1)


class Embeddings(nn.Module):
    """A sum of what the rows of two tables say about the input; different rows on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Embedding(12, 6, sparse=True)
        self.signs = nn.Embedding(64, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signs = ((x > 0) * 2 ** torch.arange(6)).sum(1)
        return self.values((x.abs() * 4).long().clamp(max=11)).sum(1) + self.signs(signs)


class Unused(nn.Module):
    """One layer is never used, and one only by some examples, so that a rank may have none of those."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.always, self.rarely = nn.Linear(3, 3), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.always(x)
        rare = x[:, :1] > 1.0
        return result + self.rarely(x) * rare if rare.any() else result


class Shared(nn.Module):
    """A model whose first and last layer are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(6, 5, bias=False)
        self.inner = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.embedding(x)).tanh() @ self.embedding.weight


DENSE_MODELS: list[Callable[[], nn.Module]] = [mlp, cnn, Transformer, Unused, Shared]


Case = tuple[Callable[[], nn.Module], Make, dict[str, float], dict[str, Any]]


def cases() -> Iterator[tuple[str, Case]]:
    """A name; the model, the optimizer, the tolerance, and options of the wrapper."""
    for make_model in DENSE_MODELS:
        for name, (make, tolerance) in OPTIMIZERS.items():
            yield f"{make_model.__name__}, {name}", (make_model, make, tolerance, {})
    for name, (make, tolerance) in SPARSE_OPTIMIZERS.items():
        for options in ({}, {"sparse_as_dense": True}):
            yield f"Embeddings, {name}, {'dense' if options else 'sparse'}", (Embeddings, make, tolerance, options)


CASES = dict(cases())


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


@pytest.mark.parametrize("name", CASES)
@on_ranks(2, 3, (2, "mpi_ring"), (2, "fusion_threshold_mb=0.0001"))
def test_ranks_train_as_one_process(name: str) -> None:
    make_model, make_optimizer, tolerance, options = CASES[name]
    rank = hvd.rank()
    torch.manual_seed(7)
    alone = make_model()
    expected = train(alone, make_optimizer(alone.parameters()), range(hvd.size()))

    torch.manual_seed(7 if rank == 0 else 100 + rank)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    weights = train(model, optimizer, range(rank, rank + 1))

    torch.testing.assert_close(weights, expected, **tolerance)
    hvd.check_consistency(model, optimizer)
