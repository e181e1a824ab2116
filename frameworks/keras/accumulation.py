"""The gradients of several calls, added up before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from horovodish.gradients import windows
from horovodish.keras import backends
from horovodish.keras.added_variables import AddedVariables


class Accumulation(AddedVariables):
    """The state of `backward_passes_per_step` in an optimizer: sums and a count, as variables for compiled steps.

    Args:
        passes: calls of a window.
        averages: whether the sum is divided by their number.
    """

    def __init__(self, passes: int, averages: bool) -> None:
        self.passes = passes
        self._averages = averages
        self._sums: list[Any] = []
        self._count: Any = None
        self._variables: list[Any] = []
        self._places: dict[int, int] = {}
        self._seen: set[int] = set()  # places that had a gradient in this window
        self._traced: set[int] | None = None  # the same for all windows of TensorFlow's functions
        windows.follow(self)

    def is_open(self) -> bool:
        """Whether it has gradients that no step has used."""
        return self._count is not None and int(keras.ops.convert_to_numpy(self._count)) != 0

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Adds the variables to the optimizer's."""
        self._variables = list(variables)
        self._places = {id(variable): place for place, variable in enumerate(variables)}
        self._sums = [optimizer.add_variable_from_reference(variable, name="window") for variable in variables]
        self._count = optimizer.add_variable(shape=(), dtype="int32", name="passes_of_window")

    def own(self) -> list[Any]:
        return [*self._sums, self._count] if self._sums else []

    @property
    def slots(self) -> list[tuple[Any, Any]]:
        """The sum of each variable's gradients, with the variable."""
        return list(zip(self._sums, self._variables, strict=False))

    def restart(self) -> None:
        """Begins the window anew, without what was added up."""
        for variable in self.own():
            variable.assign(
                keras.ops.zeros(variable.shape, variable.dtype)
            )  # a step that failed may have taken the value
        self._seen.clear()

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        update: Callable[[Sequence[Any]], None],
    ) -> None:
        """Adds gradients and, if the window is complete, calls `update` with the sums and begins a new one.

        Raises:
            ValueError: other passes have a gradient for other variables, which would be lost.
        """
        self._check_built()
        places = [self._places[id(v)] for v in variables] if variables is not None else list(range(len(self._sums)))
        seen = self._seen_with(places, gradients)
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is not None:
                self._sums[place].assign_add(backends.gradients().dense(gradient))
        self._count.assign_add(1)

        def complete() -> None:
            sums = [self._sums[place].value if place in seen else None for place in places]
            update([self._scaled(total) for total in sums])
            for total in self._sums:
                total.assign(keras.ops.zeros_like(total.value))
            self._count.assign(0)
            self._seen.clear()

        if keras.config.backend() == "jax":  # its cond compiles both branches, which must not assign
            if int(self._count) == self.passes:
                complete()
        else:
            keras.ops.cond(keras.ops.equal(self._count, self.passes), complete, lambda: None)

    def stateless_apply(
        self,
        optimizer: Any,
        optimizer_variables: Sequence[Any],
        gradients: Sequence[Any],
        trainable_variables: Sequence[Any],
        update: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        """As `apply`, on values: returns the new values of the trainable and of the optimizer's variables."""
        self._check_built()
        place_of = {id(variable): place for place, variable in enumerate(optimizer.variables)}
        places = [place_of[id(variable)] for variable in self.own()]
        values = list(optimizer_variables)
        sums = [values[place] + gradient for place, gradient in zip(places, gradients, strict=False)]
        count = values[places[-1]] + 1

        def with_window(values: Sequence[Any], window: Sequence[Any]) -> list[Any]:
            result = list(values)
            for place, value in zip(places, window, strict=True):
                result[place] = value
            return result

        def complete() -> tuple[Any, Any]:
            empty = [keras.ops.zeros_like(value) for value in [*sums, count]]
            trained, state = update([self._scaled(total) for total in sums], values)
            return list(trained), with_window(state, empty)

        def incomplete() -> tuple[Any, Any]:
            return list(trainable_variables), with_window(values, [*sums, count])

        return keras.ops.cond(keras.ops.equal(count, self.passes), complete, incomplete)

    def _seen_with(self, places: Sequence[int], gradients: Sequence[Any]) -> set[int]:
        """The places that have a gradient in this window, including this pass."""
        present = {place for place, gradient in zip(places, gradients, strict=True) if gradient is not None}
        if backends.gradients().is_traced(gradients):
            # A function that was traced before would leave out the new gradients when it ends a window.
            self._traced = seen = present if self._traced is None else self._traced
        else:
            self._seen |= present
            seen = self._seen
        for place in (present - seen) | (seen - set(places)):
            raise ValueError(
                f"{self._variables[place].path}: some passes have a gradient for it and others none; with "
                "backward_passes_per_step pass the same variables to the optimizer every time, and in a tf.function "
                "compute the loss of every pass from the same ones. Where they change, make a new optimizer"
            )
        return seen

    def _scaled(self, total: Any) -> Any:
        return total / self.passes if self._averages and total is not None else total

    def _check_built(self) -> None:
        if not self._sums:
            raise ValueError(
                "backward_passes_per_step needs the optimizer's variables, which it was built with before it was "
                "wrapped; wrap it before compile() or build()"
            )
