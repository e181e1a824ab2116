"""Which gradients were computed and have not had their effect on parameters yet, in whichever framework."""

from __future__ import annotations

import weakref
from typing import Protocol

from horovodish.runtime.process import part

__all__ = ["Window", "any_open", "follow", "restart"]


class Window(Protocol):
    """Accumulates gradients over one or more passes, for one optimizer."""

    def is_open(self) -> bool:
        """Whether it has gradients that no step has used."""

    def restart(self) -> None:
        """Forget the gradients, and what was under way among other ranks."""


class _Windows(weakref.WeakSet[Window]):
    """The windows of a rank."""


def follow(window: Window) -> None:
    """From now on, count this window as long as it lives."""
    part(_Windows).add(window)


def any_open() -> bool:
    """Whether any window of this process is open."""
    return any(window.is_open() for window in part(_Windows))


def restart() -> None:
    """After another `init()`: have all windows of this process begin anew."""
    for window in list(part(_Windows)):
        window.restart()
