"""Wrapped optimizers that reduce the changes of each step: with `op=Adasum`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from horovodish.gradients.autotune import warn_of_no_effect
from horovodish.gradients.options import GradientOptions, checked_passes
from horovodish.torch.gradients.steps import StepReducer
from horovodish.torch.names import Names
from horovodish.torch.wrapped.base import Distributed, is_within_step, unscale


class ReducesSteps(Distributed):
    """With Adasum. Gradients stay each rank's own, so most methods have nothing to do."""

    _reducer: StepReducer
    # GradScaler then calls step() on every rank, whatever its gradients are; see _before_step.
    _step_supports_amp_scaling = True

    @classmethod
    def _reducer_of(cls, optimizer: Any, names: Names, options: GradientOptions) -> StepReducer:
        warn_of_no_effect("optimizers with sync=" if options.sync else "optimizers with op=Adasum")
        return StepReducer(names, options)

    @classmethod
    def _register(cls, optimizer: Any) -> None:
        Optimizer.register_step_pre_hook(optimizer, _before_step)
        Optimizer.register_step_post_hook(optimizer, _after_step)

    def synchronize(self) -> None:
        """End the reduction of a `step()` that Ctrl-C has interrupted. Otherwise nothing, because `step()` reduces."""
        self._reducer.settle()

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not possible with Adasum.

        Raises:
            ValueError: always.
        """
        raise ValueError("skip_synchronize() is not for op=Adasum: it is what step() has changed that is reduced")

    def no_sync(self) -> AbstractContextManager[None]:
        """A context that changes nothing: `backward()` never reduces."""
        return nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: `step()` ends a window.

        Raises:
            ValueError: `passes` is less than 1.
        """
        checked_passes(passes)


@_disable_dynamo
def _before_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if is_within_step(optimizer):
        return
    if "_step_supports_amp_scaling" not in vars(optimizer):  # a fused optimizer does this by itself
        unscale(optimizer)
    optimizer._reducer.before_step()


@_disable_dynamo
def _after_step(optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not is_within_step(optimizer):
        optimizer._reducer.after_step()
