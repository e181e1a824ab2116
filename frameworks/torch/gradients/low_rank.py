"""PowerSGD for PyTorch: at the end of a backward, the gradients of large parameters are reduced as two factors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from horovodish.collectives.submission import Handle
from horovodish.gradients.options import GradientOptions
from horovodish.gradients.powersgd import LowRank, PowerSGD, approximated
from horovodish.torch.adapter import TENSORS


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

        def reduced(which: str, factors: dict[str, Tensor]) -> dict[str, Tensor]:
            if which not in self._handles:
                has = next(iter(factors.values())).new_tensor([each.grad is not None for each in self.chosen.values()])
                operation = self._options.operation(f"{which} factors of {name}", [*factors, "who has a gradient"])
                self._handles[which] = TENSORS.group(operation, [*factors.values(), has])
            return dict(zip(factors, self._handles[which].wait(), strict=False))

        gradients = {
            label: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            for label, parameter in self.chosen.items()
        }
        try:
            results, kept = approximated(torch, gradients, self._kept, reduced)
        except Exception as error:
            self._handles = {}
            return error
        *_, has = self._handles.pop("second").wait()
        self._handles = {}
        for (label, parameter), somebody_has in zip(self.chosen.items(), has.tolist(), strict=True):
            if somebody_has:
                self._kept[label] = kept[label]
                if parameter.grad is not None and parameter.grad.layout is torch.strided:
                    parameter.grad.copy_(results[label])
                else:
                    parameter.grad = results[label]
        return None
