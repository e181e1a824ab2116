"""What `sync=` is to give, computed by one process that plays all ranks with policies that are written out here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Played:
    """All ranks of a world: a model and an optimizer each.

    Attributes:
        every, after, overlap: of the policy.
        shifts: of each parameter, by how many steps its meetings come before those of a policy without fragments.
        outer: makes the outer optimizer from the parameters of one model; None: what meets is averaged.
        teams: sets of ranks that average their gradients in every step.
    """

    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    every: int
    after: int = 0
    overlap: int = 0
    shifts: list[int] = field(default_factory=list)
    outer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    teams: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = 0
        self.common = nn.ParameterList([nn.Parameter(each.detach().clone()) for each in self.models[0].parameters()])
        self._outer = self.outer(list(self.common)) if self.outer else None
        self._flying: list[tuple[int, int, Tensor, list[Tensor]]] = []
        self._shifts = self.shifts or [0] * len(self.common)

    def step(self, gradients: Callable[[nn.Module, int], None]) -> None:
        """One step of all ranks. `gradients(model, rank)` computes the gradients of a rank."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            gradients(model, rank)
        everybody = list(range(len(self.models)))
        for team in [everybody] if self.steps < self.after else self.teams:
            for parameters in zip(*(self.models[rank].parameters() for rank in team), strict=True):
                mean = torch.stack([each.grad for each in parameters]).mean(0)
                for each in parameters:
                    each.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps += 1
        self._meet()

    @torch.no_grad()
    def _meet(self) -> None:
        columns = [*zip(*(model.parameters() for model in self.models), strict=True)]
        if self.steps <= self.after:
            for common, parameters in zip(self.common, columns, strict=True):
                common.copy_(parameters[0])
        for index, parameters in enumerate(columns):
            number = self.steps - self.after
            if number > 0 and (number + self._shifts[index]) % self.every == 0:
                change = torch.stack([each - self.common[index] for each in parameters]).mean(0)
                self._flying.append((self.steps + self.overlap, index, change, [each.clone() for each in parameters]))
        for due, index, change, sent in self._flying:
            if due != self.steps:
                continue
            common = self.common[index]
            if self._outer is None:
                common.add_(change)
            else:
                common.grad = -change
                self._outer.step()
                common.grad = None
            for parameter, before in zip(columns[index], sent, strict=True):
                parameter.add_(common - before)


def digits_model() -> nn.Module:
    """A small model with parameters of several sizes."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def gradients_of(model: nn.Module, step: int, rank: int) -> None:
    """Computes the gradients of a rank's batch of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(4, 3, generator=generator)).square().sum().backward()


def values_of(model: nn.Module) -> list[Any]:
    """The parameters, as lists that compare bit by bit."""
    return [parameter.detach().tolist() for parameter in model.parameters()]
