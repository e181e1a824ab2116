"""Models and optimizers of PyTorch that are trained with and without shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import horovodish.torch as hvd

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


class Lamb(torch.optim.Optimizer):
    """Steps a parameter by its norm, and has state of other shapes: a number for each row, and a number."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                its = self.state[parameter]
                if not its:
                    its["average"] = torch.zeros_like(parameter)
                    its["rows"] = torch.zeros(parameter.shape[:1])
                    its["steps"] = 0
                its["steps"] += 1
                its["average"].mul_(0.9).add_(parameter.grad)
                its["rows"].add_(parameter.grad.square().flatten(1).sum(1) if parameter.dim() > 1 else 1.0)
                scale = its["rows"].rsqrt().reshape(-1, *[1] * (parameter.dim() - 1)) if parameter.dim() else 1.0
                update = its["average"] * scale
                trust = parameter.norm() / update.norm() if parameter.numel() and update.norm() > 0 else 1.0
                parameter.sub_(update * trust, alpha=group["lr"])


WHOLE: dict[str, Make] = {
    "LAMB": lambda p: Lamb(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "AdamW": OPTIMIZERS["AdamW"],
}


SHARED: dict[str, dict[str, str]] = {
    "states": {"shard": "states"},
    "gradients": {"shard": "gradients"},
    "parameter": {"shard": "states", "shard_by": "parameter"},
}


class Model(nn.Module):
    """With parameters without elements, of shape (), in channels-last format, never used, and tied."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(5, 21)
        self.outer = nn.Linear(21, 5)
        self.outer.weight = nn.Parameter(self.outer.weight.detach().t().contiguous().t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 7)
        self.convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.tied = self.inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(torch.tanh(self.inner(x))) * self.factor
        return y.square().mean() + self.convolution(self.tied(y)[:, :12].reshape(-1, 3, 2, 2)).square().mean()


def pair(make: Make, shard: str, model: Callable[[], nn.Module] = Model, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A model and its optimizer without shards, and with them."""
    found: list[Any] = []
    for way in ("", shard):
        made = model()
        optimizer = make(parameter for parameter in made.parameters() if parameter.requires_grad)
        its = options if way else {name: value for name, value in options.items() if not name.startswith("shard")}
        found += [made, hvd.DistributedOptimizer(optimizer, made.named_parameters(), shard=way, **its)]
    return found[0], found[1], found[2], found[3]


def batches(steps: int, salt: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * hvd.rank() + salt)
    return [torch.randn(4, 5, generator=generator) for _ in range(steps)]


def train(model: nn.Module, optimizer: Any, steps: int, salt: int = 0) -> None:
    for x in batches(steps, salt):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> None:
    for (name, own), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(own, theirs), f"{name}: {(own - theirs).abs().max()}"


def same_state(one: Any, other: Any) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, its in one["state"].items():
        assert its.keys() == other["state"][index].keys()
        for key, value in its.items():
            theirs = other["state"][index][key]
            assert type(value) is type(theirs)
            if isinstance(value, Tensor):
                assert value.shape == theirs.shape and value.dtype == theirs.dtype and value.stride() == theirs.stride()
                assert torch.equal(value, theirs), (index, key)
            else:
                assert value == theirs


def plain_adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def pairs_of_ranks() -> hvd.ProcessSet:
    """The pair of ranks that this one is in: 0 and 2, or 1 and 3, and so on."""
    sets = [hvd.add_process_set([low, low + 2]) for low in range(hvd.size()) if low % 4 < 2]
    return next(each for each in sets if each.included())


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.late = nn.Linear(5, 30), nn.Linear(30, 11), nn.Linear(11, 3)
        self.late.requires_grad_(False)
        self.uses_late = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).tanh())
        if self.uses_late:
            self.late.requires_grad_(True)
            y = self.late(y)
        return y.square().mean()
