"""A warning if each rank trains by itself, because nothing of ours is wrapped around what trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from horovodish import _native
from horovodish.launch import failures
from horovodish.runtime import basics

__all__ = ["Count", "LoneSteps", "calls_of"]

STEPS_PER_COLLECTIVE = 10
"""There is no warning if the script makes at least one collective per this many steps, besides single numbers."""
EARLY_STEPS = 100
"""After this many steps without any such collective, the warning comes at once, not at the end."""
_METRICS = 4
"""A program counts as reducing nothing if less than this part of the bytes of its parameters was reduced."""
_ALLOWED = "If each rank is to train its own model, or if the script averages the models itself, ignore this warning."

Count = Callable[[str, Callable[[], int]], None]
"""Counts a step. Gets what takes it, and what gives the bytes of the parameters that it trains."""


class LoneSteps:
    """Steps that this rank takes with optimizers that are not wrapped, since the last `init()`. Rank 0 warns.

    Args:
        watch: has `count` called before each step of an optimizer that is not wrapped, and gives what ends that.
        remedy: how to wrap an optimizer.
        traced: a step may be a program, which is counted when it is traced only. So nothing depends on their number,
            and a step of anything that is wrapped is enough.
    """

    def __init__(self, watch: Callable[[Count], Callable[[], object]], remedy: str, *, traced: bool = False) -> None:
        self._watch = watch
        self._remedy = remedy
        self._traced = traced
        self._end_watch: Callable[[], object] | None = None
        self._engine: _native.Engine | None = None
        self._place: failures.Place | None = None
        self._kind = ""
        self._size = self._steps = self._completed_before = self._reduced_before = self._bytes = 0
        basics.follow(started=self._begin, stopped=self._end)
        if basics.has_engine():
            self._begin()

    def _begin(self, _: object = None) -> None:
        if basics.size() > 1:
            self._engine = basics.engine() if basics.rank() == 0 else None
            self._size, self._steps = basics.size(), 0
            self._end_watch = self._watch(self._count)

    def _count(self, kind: str, trained_bytes: Callable[[], int]) -> None:
        engine = self._engine
        if engine is None:
            return
        if not self._steps:
            self._completed_before, self._reduced_before = engine.completed(), engine.reduced_bytes()
            self._kind, self._bytes, self._place = kind, trained_bytes(), failures.place_in_script()
        self._steps += 1
        if self._steps == EARLY_STEPS and not self._traced and engine.completed() == self._completed_before:
            self._warn(engine)

    def _end(self) -> None:
        """The engine has stopped: warn if there were steps, and hardly any collectives."""
        engine, end_watch = self._engine, self._end_watch
        self._engine = self._end_watch = None
        if end_watch is not None:
            end_watch()
        if engine is not None and self._steps and not failures.reason and not basics.loss():
            self._warn(engine)

    def _warn(self, engine: _native.Engine) -> None:
        """Warn, once, unless the script has reduced gradients or models in ways of its own."""
        self._engine = None
        reduced = engine.reduced_bytes() - self._reduced_before
        # Scripts may average the model itself now and then, or gradients within process sets.
        if self._traced:
            is_shared = engine.steps() > 0 or self._bytes <= reduced * _METRICS
        else:
            completed = engine.completed() - self._completed_before
            is_shared = 0 < self._bytes <= reduced or completed * STEPS_PER_COLLECTIVE >= self._steps
        if is_shared:
            return
        steps = f"has trained with {self._kind}" if self._traced else f"took {self._steps} steps of {self._kind}"
        failures.warn(
            f"rank 0 of {self._size} {steps} and reduced no gradients, so each rank has trained its own model. "
            f"Remedy: {self._remedy}. {_ALLOWED}",
            self._place,
        )


def calls_of(owner: Any, name: str, before: Callable[..., object]) -> Callable[[], object]:
    """Have a function called before each call of a function or method, with the same arguments.

    Args:
        owner: the class or module that has it.
        name: of the function or method.
        before: what to call.

    Returns:
        What ends that.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*arguments: Any, **options: Any) -> Any:
        before(*arguments, **options)
        return original(*arguments, **options)

    setattr(owner, name, watched)

    def end() -> None:
        if getattr(owner, name) is watched:  # else somebody else has replaced it since
            setattr(owner, name, original)

    return end
