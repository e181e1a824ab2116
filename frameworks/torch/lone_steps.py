"""A warning at the end of a job in which each rank has trained by itself, because its optimizer is not wrapped."""

from __future__ import annotations

import warnings
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from horovodish import _native
from horovodish.launch import failures
from horovodish.runtime import basics
from horovodish.torch.optimizer import is_distributed

__all__: list[str] = []

FEWEST_STEPS = 10
"""Fewer steps do not count as training, nor do steps with a collective for each so many of them."""


class _LoneSteps:
    """Steps that rank 0 takes with optimizers that are not wrapped, since the last `init()`."""

    def __init__(self) -> None:
        self._engine: _native.Engine | None = None
        self._hook: RemovableHandle | None = None
        self._kind = ""
        self._size = self._steps = self._completed_before = self._reduced_before = self._bytes = 0

    def begin(self, _: Any = None) -> None:
        """The engine has started."""
        if basics.size() > 1 and basics.rank() == 0:
            self._engine, self._size, self._steps = basics.engine(), basics.size(), 0
            self._hook = register_optimizer_step_pre_hook(self._count)

    @_disable_dynamo
    def _count(self, optimizer: Optimizer, *_: object) -> None:
        if self._engine is None or is_distributed(optimizer):
            return
        if not self._steps:
            self._completed_before, self._reduced_before = self._engine.completed(), self._engine.reduced_bytes()
            self._kind = type(optimizer).__name__
            self._bytes = sum(
                parameter.numel() * parameter.element_size()
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
        self._steps += 1

    def end(self) -> None:
        """The engine has stopped: warn if there were steps, and hardly any collectives."""
        engine, hook = self._engine, self._hook
        if engine is None or hook is None:
            return
        self._engine = self._hook = None
        hook.remove()
        if self._steps < FEWEST_STEPS or failures.reason or basics.loss():
            return
        if 0 < self._bytes <= engine.reduced_bytes() - self._reduced_before:
            return  # Scripts may average the model itself now and then, or gradients within process sets.
        if (engine.completed() - self._completed_before) * FEWEST_STEPS < self._steps:
            warnings.warn(
                f"rank 0 of {self._size} took {self._steps} steps of {self._kind} and reduced no gradients, so each "
                "rank has trained a model of its own. Remedy: optimizer = hvd.DistributedOptimizer(optimizer, "
                "named_parameters=model.named_parameters())",
                RuntimeWarning,
                stacklevel=2,
            )


_lone_steps = _LoneSteps()
basics.follow(started=_lone_steps.begin, stopped=_lone_steps.end)
if basics.has_engine():
    _lone_steps.begin()
