"""Gradients that are added up on a rank for several steps before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from horovodish.gradients import windows
from horovodish.tensorflow.whole_steps import hold_writes


class LocalAggregation:
    """A window of some passes. It keeps its place in variables, so that it works within a `tf.function`.

    Args:
        passes: the length of the window.
        average: divide the sum by that.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self.passes = passes
        self._average = average
        self._sums: list[tf.Variable] = []
        self._seen: tf.Variable | None = None
        self._used: set[int] = set()  # what had a gradient in the window that is open
        self._traced: set[int] | None = None  # the same for all windows of functions
        windows.follow(self)

    def is_open(self) -> bool:
        """Whether it has gradients that no step has used. Within a function or a graph for sessions nobody can know."""
        return self._seen is not None and tf.executing_eagerly() and int(self._seen) % self.passes != 0

    def restart(self) -> None:
        """Forgets the gradients. In a graph for sessions they stay."""
        if self._seen is not None and tf.executing_eagerly():
            for variable in [self._seen, *self._sums]:
                variable.assign(tf.zeros_like(variable))
            self._used = set()

    def add(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """One pass. The gradients are made dense; those that are None in the whole window stay so.

        Args:
            gradients: of this pass, those of the same variables each time.
            variables: of the gradients.
            reduce: makes the gradients of all ranks from the sums of this one; called in the last pass of a window.

        Returns:
            What `reduce` gives in the last pass of a window; zeros in the others, where nothing is to be applied.

        Raises:
            ValueError: another number of gradients than before, or in a function those of other variables.
        """
        self.prepare(variables)
        assert self._seen is not None
        if len(gradients) != len(self._sums):
            raise ValueError(
                f"{len(gradients)} gradients came, and {len(self._sums)} in the pass before; with "
                "backward_passes_per_step they must be of the same variables each time"
            )
        used = self._used_with(gradients, variables)
        for each, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                each.assign_add(tf.convert_to_tensor(gradient))
        self._seen.assign_add(1)

        def complete() -> list[Any]:
            divisor = self.passes if self._average else 1
            scaled = [
                each / tf.cast(divisor, each.dtype) if index in used else None for index, each in enumerate(self._sums)
            ]
            reduced = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in reduce(scaled)]
            with tf.control_dependencies([gradient for gradient in reduced if gradient is not None]):
                for each in self._sums:
                    each.assign(tf.zeros_like(each))
            self._used = set()
            return reduced

        def partial() -> list[Any]:
            return [tf.zeros_like(each) if index in used else None for index, each in enumerate(self._sums)]

        is_last = tf.equal(self._seen % self.passes, 0)
        if tf.executing_eagerly():
            return complete() if is_last else partial()
        found = tf.cond(is_last, lambda: _present(complete()), lambda: _present(partial()))
        hold_writes(found)
        results: list[Any] = [None] * len(gradients)
        for index, gradient in zip(sorted(used), found, strict=True):
            results[index] = gradient
        return results

    def when_complete(self, apply: Callable[[], Any]) -> Any:
        """Calls `apply` in the last pass of a window and at no other time."""
        if self._seen is None:
            return apply()

        def applied() -> tf.Tensor:
            done = apply()
            with tf.control_dependencies([] if done is None else [done]):
                return tf.constant(True)

        return tf.cond(tf.equal(self._seen % self.passes, 0), applied, lambda: tf.constant(False))

    def prepare(self, variables: Sequence[Any]) -> None:
        """Makes the variables of the window, in the first pass."""
        if self._seen is not None:
            return
        with tf.init_scope():
            self._seen = tf.Variable(0, trainable=False, dtype=tf.int64, name="passes")
            self._sums = [tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False) for each in variables]

    def _used_with(self, gradients: Sequence[Any], variables: Sequence[Any]) -> set[int]:
        """Of which variables there are gradients in this window, with those of this pass."""
        present = {index for index, gradient in enumerate(gradients) if gradient is not None}
        if tf.executing_eagerly():
            self._used |= present
            return self._used
        if self._traced is None:
            self._traced = present
        for index in present - self._traced:
            # A function that was traced before would leave it out when it ends a window.
            raise ValueError(
                f"{variables[index].name} has a gradient in this pass, and had none when the first pass was traced; "
                "with backward_passes_per_step in a tf.function, compute the loss of every pass from the same variables"
            )
        return self._traced


def _present(gradients: list[Any]) -> list[Any]:
    return [gradient for gradient in gradients if gradient is not None]
