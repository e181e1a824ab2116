"""Parameters whose gradients are known numbers, different on each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import horovodish.torch as hvd


def wrapped(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """A wrapped SGD over parameters, or over pairs of names and parameters."""
    parameters = list(parameters)
    named = parameters if isinstance(parameters[0], tuple) else None
    plain = [parameter for _, parameter in parameters] if named else parameters
    return hvd.DistributedOptimizer(torch.optim.SGD(plain, lr=1.0), named, **options)


def leaf(value: float = 0.0) -> nn.Parameter:
    """A parameter of three equal values."""
    return nn.Parameter(torch.full((3,), value))


def own(step: int = 0) -> float:
    """A number that differs by rank and step; the gradient of a loss that multiplies with it."""
    return float(2 ** (hvd.rank() + 2 * step))


def mean(step: int = 0) -> float:
    """What averaging `own(step)` gives."""
    return total(step) / hvd.size()


def total(step: int = 0) -> float:
    """What summing `own(step)` gives."""
    return sum(2.0 ** (rank + 2 * step) for rank in range(hvd.size()))


def backward(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Gives each parameter a gradient of `factor` everywhere."""
    sum((parameter * factor).sum() for parameter in parameters).backward()  # type: ignore[union-attr]


def check(parameter: torch.Tensor, expected: float) -> None:
    """The gradient is `expected` everywhere."""
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected), rtol=1e-6, atol=0)
