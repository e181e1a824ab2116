"""Gradients that are added up on a rank for several steps before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


class LocalAggregation:
    """A window of some passes. It keeps its place in variables, so that it works within a `tf.function`.

    Args:
        passes: the length of the window.
        average: divide the sum by that.
    """

    def __init__(self, passes: int, average: bool) -> None:
        if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
            raise ValueError(f"backward_passes_per_step={passes!r} must be a whole number, 1 or more")
        self.passes = passes
        self._average = average
        self._sums: list[tf.Variable | None] = []
        self._seen: tf.Variable | None = None

    def add(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Callable[[list[Any]], list[Any]]
    ) -> list[Any]:
        """One pass. The gradients are made dense; those that are None stay so.

        Args:
            gradients: of this pass, those of the same variables each time.
            variables: of the gradients.
            reduce: makes the gradients of all ranks from the sums of this one; called in the last pass of a window.

        Returns:
            What `reduce` gives in the last pass of a window; zeros in the others, where nothing is to be applied.

        Raises:
            ValueError: another number of gradients than before.
        """
        self._prepare(gradients, variables)
        assert self._seen is not None
        if len(gradients) != len(self._sums):
            raise ValueError(
                f"{len(gradients)} gradients came, and {len(self._sums)} in the pass before; with "
                "backward_passes_per_step they must be of the same variables each time"
            )
        sums = {index: each for index, each in enumerate(self._sums) if each is not None}
        for index, each in sums.items():
            if gradients[index] is not None:
                each.assign_add(tf.convert_to_tensor(gradients[index]))
        self._seen.assign_add(1)

        def complete() -> list[tf.Tensor]:
            divisor = self.passes if self._average else 1
            scaled = [None if each is None else each / tf.cast(divisor, each.dtype) for each in self._sums]
            reduced = [tf.convert_to_tensor(gradient) for gradient in reduce(scaled) if gradient is not None]
            with tf.control_dependencies(reduced):
                for each in sums.values():
                    each.assign(tf.zeros_like(each))
            return reduced

        def partial() -> list[tf.Tensor]:
            return [tf.zeros_like(each) for each in sums.values()]

        results: list[Any] = [None] * len(gradients)
        found = tf.cond(tf.equal(self._seen % self.passes, 0), complete, partial)
        for index, gradient in zip(sums, found, strict=True):
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

    def _prepare(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        if self._seen is not None or self.passes == 1:
            return
        with tf.init_scope():
            self._seen = tf.Variable(0, trainable=False, dtype=tf.int64, name="passes")
            self._sums = [
                None if gradient is None else tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                for gradient, variable in zip(gradients, variables, strict=True)
            ]
