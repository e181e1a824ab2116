"""Wrapped optimizers whose steps go on without late ranks: with `wait_for`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from horovodish.gradients.late_steps import Average
from horovodish.gradients.options import GradientOptions
from horovodish.torch.gradients.late import LateReducer, with_options
from horovodish.torch.names import Names
from horovodish.torch.wrapped.base import Distributed, check_once


class GoesOn(Distributed):
    """With `wait_for`."""

    _reducer: LateReducer

    @classmethod
    def _reducer_of(cls, optimizer: Any, names: Names, options: GradientOptions) -> LateReducer:
        return LateReducer(optimizer, names, options)

    @classmethod
    def _register(cls, optimizer: Any) -> None:
        # GradScaler would leave it to a fused step to unscale, but what that steps with is of all ranks.
        optimizer._step_supports_amp_scaling = False

    @property
    def steps(self) -> int:
        """How many steps the optimizer has taken, those among them that were taken without this rank."""
        return self._reducer.steps

    def step(self, closure: None = None) -> None:
        """Give this rank's gradients, and take the steps that can be taken: one, and those that this rank has missed.

        Raises:
            ValueError: there is a closure.
            HorovodInternalError: a reduction failed, or a rank was lost.
            RuntimeError: an exception has interrupted an earlier step after it had changed parameters.
        """
        this: Any = self
        check_once(this)
        if closure is not None:
            raise ValueError("wait_for=: step() takes no closure. Remedy: call backward() before it")
        if self._reducer.is_alone():
            self.wrapped_class.step(this)
            self._reducer.steps += 1
            return
        self.take_steps(self._reducer.averages())

    step.hooked = True  # type: ignore[attr-defined]  # load_state_dict() would have step() call hooks, too

    def take_steps(self, averages: list[Average]) -> None:
        """Take a step with each average. What an exception leaves out, the next call of `step()` takes."""
        this: Any = self
        for number, average in enumerate(averages):
            with self._reducer.taking(averages[number:]), with_options(this, average.options):
                self._reducer.put(average)
                self.wrapped_class.step(this)

    def synchronize(self) -> None:
        """Nothing: `step()` reduces."""

    def no_sync(self) -> AbstractContextManager[None]:
        """A context that changes nothing: `backward()` never reduces."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and "steps". A plain optimizer can load it. Not collective."""
        this: Any = self
        return self.wrapped_class.state_dict(this) | {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict()` of this class or of the wrapped one has given, the same on every rank.

        Before the first step it is not collective. Later every rank must call it; it blocks.
        """
        this: Any = self
        self.wrapped_class.load_state_dict(this, {key: state_dict[key] for key in state_dict if key != "steps"})
        self._reducer.restart()
        self._reducer.steps = state_dict.get("steps", 0)
