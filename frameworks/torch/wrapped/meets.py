"""Wrapped optimizers of ranks that take steps of their own and meet: with `sync`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from horovodish.gradients.options import checked_passes
from horovodish.torch.gradients.reducer import Reducer
from horovodish.torch.wrapped.reduces_gradients import MaySkip
from horovodish.torch.wrapped.reduces_steps import ReducesSteps


class Meets(MaySkip, ReducesSteps):
    """With `sync`. In some steps gradients may be reduced as well."""

    def _gradient_reducer(self) -> Reducer | None:
        return self._reducer.gradients

    def synchronize(self) -> None:
        """Reduce the gradients now, in steps that use other ranks' gradients. It does not end a round.

        Raises:
            HorovodInternalError: the reduction failed.
        """
        self._reducer.settle()
        if (gradients := self._gradient_reducer()) is not None:
            gradients.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """A context in which `backward()` does not reduce. Not collective."""
        gradients = self._gradient_reducer()
        return nullcontext() if gradients is None else gradients.suspended()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backwards accumulate before gradients are reduced, where they are.

        Raises:
            ValueError: `passes` is less than 1.
        """
        self._reducer.set_passes(checked_passes(passes))

    def synchronized(self) -> AbstractContextManager[None]:
        """A context in which the parameters have the values that a meeting would give them now. Collective; blocks.

        At its end each rank has its own parameters again, bit by bit, and the round goes on.

        Raises:
            RuntimeError: within another one; by `step()`, within the block.
            HorovodInternalError: the reduction failed.

        Example:
            >>> with optimizer.synchronized():
            ...     accuracy = evaluate(model)
            ...     if hvd.rank() == 0:
            ...         torch.save(model.state_dict(), "model.pt")
        """
        return self._reducer.synchronized()

    def end_round(self) -> None:
        """Meet now; nothing where no round has begun. Collective; blocks.

        Raises:
            HorovodInternalError: the reduction failed.
        """
        self._reducer.end_round()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and "sync": the number of steps, and the round's progress. Not collective.

        A plain optimizer can load it. It waits for what is under way.
        """
        this: Any = self
        return self.wrapped_class.state_dict(this) | {"sync": self._reducer.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict()` of this class or of the wrapped one has given. Not collective.

        After the state of an optimizer that was not wrapped, steps are counted from 0.

        Raises:
            RuntimeError: within `synchronized()`, which would undo it.
        """
        this: Any = self
        self._reducer.check_not_showing("load_state_dict()")
        self.wrapped_class.load_state_dict(this, {key: state_dict[key] for key in state_dict if key != "sync"})
        self._reducer.load(state_dict.get("sync"))
