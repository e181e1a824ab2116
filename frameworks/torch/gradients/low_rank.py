"""PowerSGD for PyTorch: at the end of a backward, the gradients of large parameters are reduced as two factors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from horovodish.collectives.submission import Handle
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.powersgd import Algebra, LowRank, PowerSGD, approximated
from horovodish.torch.adapter import TENSORS


class _InPlace(Algebra):
    """The total takes the place of the gradient, and then the product does: a step moves half the memory.

    It is for one step, and does nothing a second time, because Ctrl-C may have come in the middle.

    Attributes:
        absent: addresses of the gradients that no rank has, whose errors stay.
    """

    def __init__(self) -> None:
        super().__init__(torch)
        self._totals: dict[int, Tensor] = {}  # by the address of the gradient
        self._products: set[int] = set()  # likewise, of those that are there
        self.absent: set[int] = set()

    def total(self, gradient: Tensor, error: Tensor | None, columns: int) -> Any:
        if gradient.dtype is not torch.float32 or not gradient.is_contiguous():
            return super().total(gradient, error, columns)
        address = gradient.data_ptr()
        if address not in self._totals:
            total = gradient.view(-1, columns)
            self._totals[address] = total if error is None else total.add_(error)
        return self._totals[address]

    def rest(self, total: Tensor, basis: Tensor, own: Tensor, error: Tensor, finite: Tensor) -> Tensor:
        address = total.data_ptr()
        if address in self._products or address in self.absent or not finite:
            return error
        return torch.addmm(total, basis, own.T, alpha=-1, out=error)

    def product(self, basis: Tensor, second: Tensor, gradient: Tensor, finite: Tensor) -> Any:
        address = gradient.data_ptr()
        if address not in self._totals:
            return super().product(basis, second, gradient, finite)
        if address not in self._products:
            torch.mm(basis, second.T if finite else second.T * math.nan, out=gradient.view(len(basis), -1))
            self._products.add(address)
        return gradient


class LowRankGradients:
    """The gradients of one optimizer that are approximated. Without PowerSGD there are none.

    A rank without a gradient contributes its error. Where no rank has a gradient, it stays None.

    Attributes:
        chosen: the parameters, by what the ranks call them.
    """

    def __init__(self, options: GradientOptions):
        self._options = options
        self._power = options.codec if isinstance(options.codec, PowerSGD) else None
        self._exact_steps = 0
        self._kept: dict[str, LowRank] = {}
        self._handles: dict[str, Handle[list[Tensor]]] = {}
        self._algebra = _InPlace()
        self._zeros: dict[str, Tensor] = {}  # where this rank has no gradient in the step
        self.chosen: dict[str, Tensor] = {}

    def label(self, name: str, parameter: Tensor) -> str:
        """The name of a parameter. Of one to approximate, it differs between ranks with different options."""
        power = self._power
        if power is None or is_lazy(parameter) or not parameter.is_floating_point():
            return name
        shape = tuple(parameter.shape)
        return f"{name} {shape}, {power.label()}" if power.matrix(name, shape) else name

    def choose(self, dense: Iterable[tuple[str, Tensor]]) -> None:
        """Take from parameters with dense gradients those that are approximated from now on."""
        self.chosen, power = {}, self._power
        for name, parameter in dense:
            label = self.label(name, parameter)
            if power is not None and label != name and self._exact_steps >= power.start:
                self.chosen[label] = parameter
                if label not in self._kept:
                    shape = tuple(parameter.shape)
                    self._kept[label] = LowRank.begun(torch, power, name, shape, device=parameter.device)

    def begins(self, any_joined: bool) -> bool:
        """Count a step, and say whether the next one is the first to approximate.

        A rank that has joined misses the step, and may come back. So such a step does not count.
        """
        self._exact_steps += not any_joined
        return self._power is not None and not any_joined and self._exact_steps == max(self._power.start, 1)

    @torch.no_grad()
    def reduce(self, name: str) -> Exception | None:
        """Reduce the gradients and return the error, if any. Collective; blocks. After Ctrl-C, call it again.

        Args:
            name: of all gradients.
        """
        if not self.chosen:
            return None

        def reduce_factors(which: str, factors: dict[str, Tensor]) -> dict[str, Tensor]:
            if which not in self._handles:
                has = next(iter(factors.values())).new_tensor([each.grad is not None for each in self.chosen.values()])
                operation = self._options.operation(f"{which} factors of {name}", [*factors, "who has a gradient"])
                self._handles[which] = TENSORS.group(operation, [*factors.values(), has])
            *reduced, has = self._handles[which].wait()
            self._algebra.absent = {
                gradients[label].data_ptr() for label, number in zip(factors, has.tolist(), strict=True) if not number
            }
            return dict(zip(factors, reduced, strict=True))

        gradients = {}
        for label, parameter in self.chosen.items():
            if parameter.grad is None:
                gradients[label] = self._zeros.setdefault(label, torch.zeros_like(parameter))
            else:
                gradients[label] = parameter.grad.to_dense()
        try:
            results, kept = approximated(self._algebra, gradients, self._kept, reduce_factors)
        except Exception as error:
            self._begin()
            return error
        for label, parameter in self.chosen.items():
            if gradients[label].data_ptr() not in self._algebra.absent:
                self._kept[label] = kept[label]
                if parameter.grad is None or parameter.grad.layout is not torch.strided:
                    parameter.grad = results[label]
                elif parameter.grad is not results[label]:
                    parameter.grad.copy_(results[label])
        self._begin()
        return None

    def _begin(self) -> None:
        """The next step finds nothing of this one."""
        self._handles, self._algebra, self._zeros = {}, _InPlace(), {}
