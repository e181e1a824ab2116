"""The messages between the caller of `horovodish.run()` and its ranks: the call, and a report of each rank."""

import io
import linecache
import sys
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, ClassVar

from horovodish.errors import LaunchError

UNREACHED = "cannot reach the caller of horovodish.run()"
"""The message of a rank that finds no caller."""


@dataclass(frozen=True)
class Call:
    """The call that the ranks execute.

    Attributes:
        function: function, positional and keyword arguments, pickled.
        path: where the caller finds modules.
        sources: source code that is in no file, such as a notebook's cells, as `linecache` keeps it: for tracebacks.
    """

    function: bytes
    path: list[str]
    sources: dict[str, Any]

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> "Call":
        """The call of a function by this process.

        Raises:
            LaunchError: cloudpickle is not installed.
            TypeError: it is no function, or it and its arguments cannot be pickled.
        """
        if not callable(func):
            raise TypeError(f"horovodish.run() takes a function, not {func!r}")
        try:
            function = pickled((func, args, kwargs or {}))
        except LaunchError:
            raise
        except Exception as problem:
            name = getattr(func, "__qualname__", repr(func))
            raise TypeError(
                f"{name} and its arguments cannot be pickled for the ranks: {problem}. "
                "Create objects that cannot travel, such as locks, connections and generators, inside the function"
            ) from problem
        in_no_file = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
        return cls(function, list(sys.path), in_no_file)


@dataclass(frozen=True)
class Report:
    """The outcome of the function on a rank.

    Attributes:
        rank: the rank.
        host: where it ran.
        start: how often the launcher had started ranks before this one; 0 unless the job is elastic.
        time: of the end, in seconds since the epoch.
        result: what the function returned, pickled; None if it raised.
        error: class and message of the exception, such as "ValueError: no such file"; empty if there was none.
        exception: the exception, pickled; None if there was none, or if it cannot be pickled.
        traceback: of the exception, as text.
    """

    rank: int
    host: str
    start: int
    time: float
    result: bytes | None = None
    error: str = ""
    exception: bytes | None = None
    traceback: str = ""


def pickled(value: object) -> bytes:
    """The bytes for `value`. Functions and classes of `__main__`, for example of a notebook, go with their code.

    Raises:
        LaunchError: cloudpickle is not installed.
        Exception: whatever the parts of the value raise when they cannot be pickled.
    """
    try:
        import cloudpickle  # only those who run functions need it
    except ModuleNotFoundError as missing:
        raise LaunchError("horovodish.run() needs cloudpickle; install it: pip install cloudpickle") from missing
    table = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: CodeType) -> tuple[object, ...]:
        return _code_of_file, (code.co_filename, *table[CodeType](code))

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        dispatch_table: ClassVar = ChainMap({CodeType: reduce_code}, table)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _code_of_file(filename: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    """Code with the file that it was read from, which tracebacks need and cloudpickle leaves out."""
    return make(*arguments).replace(co_filename=filename)
