"""The state of a rank between calls, in one object, so that several ranks can live in one operating-system process.

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


class Process(dict[type, Any]):
    """A rank, as the modules of this process see it: an object for each of their classes, made when first asked for."""

    def __missing__(self, kind: type) -> Any:
        return self.setdefault(kind, kind())  # of two threads that make one at a time, the first one's counts

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
    """The object of a class that the current rank holds. The class takes no arguments."""
    found: T = _current.get()[kind]
    return found
