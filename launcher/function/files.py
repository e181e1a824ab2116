"""The files by which `horovodish.run()`, its launcher and its ranks exchange the function and its results.

They lie in a folder that only the user can read: the call, the options of the launcher, a report of each rank that got
to its end, and the reason if there are no ranks. Whoever loads a pickle runs what is in it, and the name of the folder
is in the command line of each rank, so every process looks whose folder it is before it takes a file out of it.
"""

import contextlib
import io
import linecache
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

from horovodish.errors import LaunchError
from horovodish.launcher.supervisor.supervisor import open_private

CALL = "call"
OPTIONS = "options"
UNSEEN = "does not see the folder of horovodish.run()"
"""What a rank says that finds no call."""
UNSAFE = "does not use the folder of horovodish.run()"
"""What a rank says where the folder is not the user's own."""
PROBLEM = "problem"
"""Why the ranks could not be started: a `LaunchError` or a `SettingError`."""


@dataclass(frozen=True)
class Call:
    """What the ranks shall do.

    Attributes:
        function: function, positional and keyword arguments, pickled.
        path: where the caller finds modules.
        sources: source code that is in no file, such as that of a notebook's cells, as `linecache` keeps it: for
            tracebacks.
    """

    function: bytes
    path: list[str]
    sources: dict[str, Any]

    @classmethod
    def of_this_process(cls, function: bytes) -> "Call":
        """The call of a function that this process has pickled."""
        in_no_file = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
        return cls(function, list(sys.path), in_no_file)


@dataclass(frozen=True)
class Report:
    """What became of the function on a rank.

    Attributes:
        rank: the rank.
        host: where it ran.
        time: of the end, in seconds since the epoch.
        result: what the function returned, pickled; None if it raised.
        error: class and message of the exception, such as "ValueError: no such file"; empty if there was none.
        exception: the exception, pickled; None if there was none, or if it cannot be pickled.
        traceback: of the exception, as text.
    """

    rank: int
    host: str
    time: float
    result: bytes | None = None
    error: str = ""
    exception: bytes | None = None
    traceback: str = ""


def name_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank}"


def pickled(value: object) -> bytes:
    """The bytes for `value`. Functions and classes of `__main__`, such as those of notebooks, go with their code.

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


def write(folder: Path, name: str, content: object) -> None:
    """Writes a file at once: no reader sees half of it.

    Raises:
        PermissionError: the folder is not the user's own.
    """
    unfinished = f"{name}.unfinished"
    with _opened(folder) as place:
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=place)
        with open(file, "wb") as stream:
            pickle.dump(content, stream)
        os.replace(unfinished, name, src_dir_fd=place, dst_dir_fd=place)


def read(folder: Path, name: str) -> Any:
    """What is in the file of that name.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: the folder is not the user's own.
    """
    with _opened(folder) as place, open(os.open(name, os.O_RDONLY, dir_fd=place), "rb") as stream:
        return pickle.load(stream)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    place = open_private(str(folder), str(folder))
    try:
        yield place
    finally:
        os.close(place)
