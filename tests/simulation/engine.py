"""Engines and handles whose callers give way while they wait."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from horovodish import _native
from horovodish._native import testing

if TYPE_CHECKING:
    from simulation.world import World


class Engine:
    """An engine whose callers give way while they wait."""

    def __init__(self, native: _native.Engine, world: World):
        # The finalizer of an optimizer holds the engine, and the world holds the optimizer.
        self.native, self._world = native, weakref.proxy(world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def enqueue(self, *arguments: Any) -> Any:
        return _Waiting(self.native.enqueue(*arguments), self._world)

    def plan(self, *arguments: Any, **options: Any) -> Any:
        return _Waiting(self.native.plan(*arguments, **options), self._world)


class _Waiting:
    """A handle or a plan, likewise."""

    def __init__(self, native: Any, world: World):
        self._native, self._world = native, world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def again(self, *arguments: Any) -> _Waiting:
        return _Waiting(self._native.again(*arguments), self._world)

    def wait(self, seconds: float) -> bool:
        if not self._native.poll():
            self._world.pause(testing.clock() + seconds, self._native.poll)
        return bool(self._native.poll())
