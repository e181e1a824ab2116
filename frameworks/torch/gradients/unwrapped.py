"""Optimizers that step and are not wrapped: the ranks compare their parameters along with a wrapped optimizer's."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from horovodish.runtime import basics
from horovodish.runtime.process import part


class Unwrapped:
    """Attributes:
    stepped: those that have stepped since the last `init()`, in this order; the values say nothing.
    """

    def __init__(self) -> None:
        self.stepped: WeakIdKeyDictionary = WeakIdKeyDictionary()


def has_stepped(optimizer: Optimizer) -> None:
    part(Unwrapped).stepped.setdefault(optimizer, True)


def named_parameters(wrapped: WeakIdKeyDictionary) -> list[tuple[str, Tensor]]:
    """The parameters of these optimizers, and what to call them.

    Args:
        wrapped: parameters of wrapped optimizers, which do not count.
    """
    return [
        (f"{index} of optimizer {number} that is not wrapped, {type(optimizer).__name__}", parameter)
        for number, optimizer in enumerate(part(Unwrapped).stepped, 1)
        for index, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"])
        if parameter not in wrapped
    ]


basics.follow(stopped=lambda: part(Unwrapped).stepped.clear())
