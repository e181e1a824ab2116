"""What a rank holds between calls, in one object, so that several ranks can live in one operating-system process.

A module that holds something defines a class for it, and asks `part()` for this rank's object of that class. Threads
that a rank starts are in its context: `contextvars.copy_context().run`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["Process", "part"]

T = TypeVar("T")


class Process:
    """A rank, as the modules of this process see it: an object for each of their classes."""

    def __init__(self) -> None:
        self._parts: dict[type, Any] = {}

    def part(self, kind: type[T]) -> T:
        """The object of a class, which takes no arguments; made when it is first asked for."""
        try:
            found: T = self._parts[kind]
        except KeyError:
            found = self._parts.setdefault(kind, kind())
        return found

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within the block, this thread acts for this rank."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)


_current = ContextVar("horovodish_process", default=Process())  # noqa: B039, the default is the one of this process


def part(kind: type[T]) -> T:
    """The object of a class that the current rank holds."""
    return _current.get().part(kind)
