"""Which gradients were computed and have not had their effect on parameters yet, in whichever framework."""

from __future__ import annotations

import atexit
import functools
import weakref
from abc import ABC, abstractmethod
from typing import Protocol

from horovodish.launch import failures
from horovodish.runtime import basics
from horovodish.runtime.process import part

__all__ = ["Round", "Window", "any_open", "follow", "note_dropped", "restart"]


class Window(Protocol):
    """Accumulates gradients over one or more passes, for one optimizer."""

    def is_open(self) -> bool:
        """Whether it has gradients that no step has used."""

    def restart(self) -> None:
        """Forget the gradients, and what was under way among other ranks."""


class Round(ABC):
    """Steps that a rank takes by itself before the ranks meet. It is a window, too."""

    _shown_at = 0

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many steps the rank has taken."""

    @abstractmethod
    def is_open(self) -> bool:
        """As `Window` says."""

    def note_shown(self) -> None:
        """`synchronized()` or a checkpoint has all steps so far."""
        self._shown_at = self.steps

    def is_left_open(self) -> bool:
        """Whether this rank has steps that no meeting, no `synchronized()` and no checkpoint has had."""
        return self.steps > self._shown_at and self.is_open()


class _Windows(weakref.WeakSet[Window]):
    """The windows of a rank.

    Attributes:
        place: the line of the script that has made the last one with rounds.
        dropped_open: whether a round that was left open is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place: failures.Place | None = None
        self.dropped_open = False


def note_dropped(window: Round) -> None:
    """A round calls it when nothing refers to it any more."""
    part(_Windows).dropped_open |= window.is_left_open()


def follow(window: Window) -> None:
    """From now on, count this window as long as it lives."""
    known = part(_Windows)
    known.add(window)
    if isinstance(window, Round):
        known.place = failures.place_in_script()
    _watch_the_end()


def any_open() -> bool:
    """Whether any window of this process is open."""
    return any(window.is_open() for window in part(_Windows))


def restart() -> None:
    """After another `init()`: have all windows of this process begin anew."""
    for window in list(part(_Windows)):
        window.restart()


@functools.cache
def _watch_the_end() -> None:
    atexit.register(_warn_of_an_open_round)


def _warn_of_an_open_round() -> None:
    """Warn, on rank 0, if the job ends well, and the ranks end it with parameters of their own."""
    if not basics.ends_in_order() or basics.rank() != 0:
        return
    known = part(_Windows)
    if known.dropped_open or any(isinstance(window, Round) and window.is_left_open() for window in known):
        failures.warn(
            "training has ended within a round of sync=, so the ranks have different parameters. Remedy: call "
            "optimizer.end_round() on every rank at the end of training, or save within optimizer.synchronized()",
            known.place,
        )
