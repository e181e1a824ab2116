"""A warning at the end of a job in which each rank has trained by itself, because its optimizer is not wrapped."""

from __future__ import annotations

import warnings

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovodish import _native, basics, failures
from horovodish.torch.optimizer import is_distributed

__all__: list[str] = []

FEWEST_STEPS = 10
"""Fewer steps do not count as training."""


class _LoneSteps:
    """Steps that rank 0 takes with optimizers that are not wrapped, since the last `init()`."""

    def __init__(self) -> None:
        self._engine: _native.Engine | None = None
        self._is_counting = False
        self._kind = ""
        self._size = self._steps = self._completed_before = 0

    def count(self, optimizer: Optimizer, *_: object) -> None:
        """An optimizer takes a step."""
        if self._engine is None:
            if not basics.is_initialized():
                return
            self._engine, self._size = basics.engine(), basics.size()
            self._is_counting = self._size > 1 and basics.rank() == 0
        if not self._is_counting or is_distributed(optimizer):
            return
        if not self._steps:
            self._completed_before, self._kind = self._engine.completed(), type(optimizer).__name__
        self._steps += 1

    def end(self) -> None:
        """The engine has stopped. Warn if there were steps, and fewer collectives than steps."""
        engine, steps = self._engine, self._steps
        self._engine, self._steps = None, 0
        if engine is None or steps < FEWEST_STEPS or failures.reason or basics.loss():
            return
        if engine.completed() - self._completed_before < steps - 1:
            warnings.warn(
                f"rank 0 of {self._size} took {steps} steps of {self._kind} and reduced no gradients, so each rank has "
                "trained a model of its own. Remedy: optimizer = hvd.DistributedOptimizer(optimizer, "
                "named_parameters=model.named_parameters())",
                RuntimeWarning,
                stacklevel=2,
            )


_lone_steps = _LoneSteps()
register_optimizer_step_pre_hook(_lone_steps.count)
basics.follow(stopped=_lone_steps.end)
