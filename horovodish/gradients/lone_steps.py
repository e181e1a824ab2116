"""A warning at the end of a job in which each rank has trained by itself, because its optimizer is not wrapped."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from horovodish import _native
from horovodish.launch import failures
from horovodish.runtime import basics

__all__ = ["Count", "LoneSteps"]

FEWEST_STEPS = 10
"""Fewer steps do not count as training, nor do steps with a collective for each so many of them."""

Count = Callable[[str, Callable[[], int]], None]
"""Counts a step. Gets the kind of the optimizer, and what gives the bytes of the parameters that it trains."""


class LoneSteps:
    """Steps that rank 0 takes with optimizers that are not wrapped, since the last `init()`.

    Args:
        watch: has `count` called before each step of an optimizer that is not wrapped, and gives what ends that.
        remedy: how to wrap an optimizer.
    """

    def __init__(self, watch: Callable[[Count], Callable[[], object]], remedy: str) -> None:
        self._watch = watch
        self._remedy = remedy
        self._end_watch: Callable[[], object] | None = None
        self._engine: _native.Engine | None = None
        self._kind = ""
        self._size = self._steps = self._completed_before = self._reduced_before = self._bytes = 0
        basics.follow(started=self._begin, stopped=self._end)
        if basics.has_engine():
            self._begin()

    def _begin(self, _: object = None) -> None:
        if basics.size() > 1 and basics.rank() == 0:
            self._engine, self._size, self._steps = basics.engine(), basics.size(), 0
            self._end_watch = self._watch(self._count)

    def _count(self, kind: str, trained_bytes: Callable[[], int]) -> None:
        if self._engine is None:
            return
        if not self._steps:
            self._completed_before, self._reduced_before = self._engine.completed(), self._engine.reduced_bytes()
            self._kind, self._bytes = kind, trained_bytes()
        self._steps += 1

    def _end(self) -> None:
        """The engine has stopped: warn if there were steps, and hardly any collectives."""
        engine, end_watch = self._engine, self._end_watch
        if engine is None or end_watch is None:
            return
        self._engine = self._end_watch = None
        end_watch()
        if self._steps < FEWEST_STEPS or failures.reason or basics.loss():
            return
        if 0 < self._bytes <= engine.reduced_bytes() - self._reduced_before:
            return  # Scripts may average the model itself now and then, or gradients within process sets.
        if (engine.completed() - self._completed_before) * FEWEST_STEPS < self._steps:
            warnings.warn(
                f"rank 0 of {self._size} took {self._steps} steps of {self._kind} and reduced no gradients, so each "
                f"rank has trained a model of its own. Remedy: {self._remedy}",
                RuntimeWarning,
                stacklevel=2,
            )
