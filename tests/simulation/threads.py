"""What a rank of a simulated world has in place of threads: coroutines that give way where they wait."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from horovodish._native import testing
from horovodish.collectives import submission

if TYPE_CHECKING:
    from simulation.world import World

# `WAITING` are the modules that interrupt their waits now and then, to look at signals.
if importlib.util.find_spec("torch") is not None:
    import torch

    from horovodish.torch.gradients import backward, fragments, reducer

    WAITING: tuple[Any, ...] = (submission, backward, fragments, reducer)

    def are_recording() -> bool:
        """Whether PyTorch records for gradients. It keeps that by threads of the operating system."""
        return torch.is_grad_enabled()

    def record(recording: bool) -> None:
        """Say whether it does."""
        torch.set_grad_enabled(recording)
else:
    WAITING = (submission,)

    def are_recording() -> bool:
        """Never, without PyTorch."""
        return False

    def record(recording: bool) -> None:
        """Nothing."""


class Threads:
    """The module `threading`, as far as a rank needs it. Nobody is interrupted within a block of a `Condition`."""

    def __init__(self, world: World):
        self._world = world

    def Thread(self, target: Callable[..., Any], args: tuple[Any, ...] = (), **_: Any) -> Thread:  # noqa: N802
        """A thread of the rank that runs."""
        return Thread(self._world, target, args)

    def Condition(self) -> Condition:  # noqa: N802
        """Something to wait for."""
        return Condition(self._world)


class Thread:
    """See `threading.Thread`."""

    def __init__(self, world: World, target: Callable[..., Any], args: tuple[Any, ...]):
        self._world, self._target, self._args = world, target, args
        self._is_over = False

    def start(self) -> None:
        self._world.spawn(self._world.acting(), self._run)

    def _run(self) -> None:
        self._target(*self._args)
        self._is_over = True

    def is_alive(self) -> bool:
        return not self._is_over

    def join(self, seconds: float = float("inf")) -> None:
        if not self._is_over:
            self._world.pause(testing.clock() + seconds, lambda: self._is_over)


class Condition:
    """See `threading.Condition`."""

    def __init__(self, world: World):
        self._world = world
        self._told = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        self._told += 1

    def wait(self, seconds: float) -> None:
        told = self._told
        self._world.pause(testing.clock() + seconds, lambda: self._told != told)
