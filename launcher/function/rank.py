"""What each rank of `horovodish.run()` executes: `python -m horovodish.launcher.function.rank FOLDER`."""

import contextlib
import linecache
import os
import pickle
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from horovodish.launcher.function.files import CALL, UNSAFE, UNSEEN, Call, Report, name_of, pickled, read, write

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def main(folder: Path) -> None:
    """Calls the function and writes down what becomes of it.

    Raises:
        BaseException: what the function raised, so that the rank fails.
    """
    rank = next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)
    host = socket.gethostname()
    try:
        call: Call = read(folder, CALL)
    except FileNotFoundError:
        sys.exit(
            f"horovodish: rank {rank} on {host} {UNSEEN}, {folder}: "
            "pass as shared_folder one that all hosts have in common"
        )
    except PermissionError as problem:
        sys.exit(
            f"horovodish: rank {rank} on {host} {UNSAFE}: {problem}, or pass as shared_folder one that all hosts have "
            "in common and in which your files belong to you"
        )
    sys.path[:] = call.path
    linecache.cache.update(call.sources)
    sys.excepthook = lambda *_: None  # the caller shows it
    try:
        result = _result(call)
    except BaseException as error:
        write(folder, name_of(rank), _failure(rank, host, error))
        raise
    write(folder, name_of(rank), Report(rank, host, time.time(), result))


def _result(call: Call) -> bytes:
    try:
        function, args, kwargs = pickle.loads(call.function)
    except Exception as problem:
        raise TypeError(f"the function cannot be loaded: {type(problem).__name__}: {problem}") from problem
    result = function(*args, **kwargs)
    try:
        return pickled(result)
    except Exception as problem:
        kind = type(result).__name__
        raise TypeError(f"the function returned a {kind} that cannot be pickled: {problem}") from problem


def _failure(rank: int, host: str, error: BaseException) -> Report:
    exception = None
    if isinstance(error, Exception):  # any other would end the caller, too
        with contextlib.suppress(Exception):
            exception = pickled(error)
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit) and not error.code:
        what = "SystemExit: 0. The function must return instead of calling sys.exit()"
    lines = traceback.format_exception(type(error), error, _outside_of_this_file(error.__traceback__))
    return Report(rank, host, time.time(), error=what, exception=exception, traceback="".join(lines))


def _outside_of_this_file(frames: TracebackType | None) -> TracebackType | None:
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main(Path(sys.argv[1]))
