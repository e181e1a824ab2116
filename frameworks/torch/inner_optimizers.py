"""Optimizers that hold others, such as Lookahead: the state of all of them decides the next step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, then those that it holds in attributes, lists, tuples and dicts. All ranks have one order."""
    found: list[Optimizer] = []

    def look_at(value: Any) -> None:
        if isinstance(value, Optimizer):
            if not any(value is other for other in found):
                found.append(value)
                for name, attribute in vars(value).items():
                    if name not in ("state", "param_groups", "defaults"):
                        look_at(attribute)
        elif type(value) in (list, tuple):
            for item in value:
                look_at(item)
        elif isinstance(value, dict):
            look_at(list(value.values()))

    look_at(optimizer)
    return found


def names_of(optimizers: Iterable[Optimizer]) -> dict[Tensor, str]:
    """The names of parameters that users have given to optimizers or to their wrappers, as `named_parameters()`."""
    names: dict[Tensor, str] = {}
    for each in optimizers:
        reducer = getattr(each, "_reducer", None)
        names.update((parameter, name) for name, parameter in (reducer._parameters.given() if reducer else ()))
        for group in each.param_groups:
            names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    return names


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether its class knows of more state than `state` and `param_groups`."""
    return type(optimizer).state_dict is not Optimizer.state_dict
