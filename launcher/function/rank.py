"""The program of each rank of `horovodish.run()`: `python -m horovodish.launcher.function.rank`."""

import contextlib
import linecache
import os
import pickle
import socket
import sys
import time
import traceback
from types import TracebackType

from horovodish.launcher.function.call import UNREACHED, Call, Report, pickled
from horovodish.launcher.function.exchange import receive, send
from horovodish.launcher.job.outcome import LEFT_STATE
from horovodish.launcher.supervisor.tcp_end import dial
from horovodish.settings import CALLER_VARIABLE, START_VARIABLE

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def main() -> None:
    """Calls one function after the other and reports what becomes of each, until the caller lets go.

    Raises:
        BaseException: what a function raised, so that the rank fails.
    """
    rank = next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)
    host, start = socket.gethostname(), int(os.environ.get(START_VARIABLE, "0"))
    try:
        caller = dial(os.environ.pop(CALLER_VARIABLE))
    except OSError as problem:
        sys.exit(f"horovodish: rank {rank} on {host} {UNREACHED}: {problem}")
    caller.settimeout(None)
    process, shown = os.getpid(), sys.excepthook
    # The hook of init() goes before this one, and tells the other ranks why this one fails.
    sys.excepthook = lambda *what: None if is_told else shown(*what)
    is_told = False  # the caller shows it
    while message := receive(caller):
        call: Call = pickle.loads(message)
        # An agent's host may have modules of the job at other places than the caller's.
        sys.path[:] = [*call.path, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        linecache.cache.update(call.sources)
        try:
            result = _result(call)
        except BaseException as error:
            if os.getpid() == process and not _leaves_by_order(error):
                send(caller, pickle.dumps(_failure(rank, host, start, error)))
                is_told = True
            raise
        if os.getpid() != process:  # the function has called os.fork(), and this is no rank
            return
        send(caller, pickle.dumps(Report(rank, host, start, time.time(), result)))


def _leaves_by_order(error: BaseException) -> bool:
    """Whether the others of an elastic job go on without this rank. The launcher knows whether it has told it to."""
    return START_VARIABLE in os.environ and isinstance(error, SystemExit) and error.code == LEFT_STATE


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


def _failure(rank: int, host: str, start: int, error: BaseException) -> Report:
    exception = None
    if isinstance(error, Exception):  # any other would end the caller, too
        with contextlib.suppress(Exception):
            exception = pickled(error)
    try:
        what = f"{type(error).__name__}: {error}"
    except Exception:  # so says the traceback, too
        what = f"{type(error).__name__}: <exception str() failed>"
    if isinstance(error, SystemExit) and not error.code:
        what = "SystemExit: 0. The function must return instead of calling sys.exit()"
    lines = traceback.format_exception(type(error), error, _outside_of_this_file(error.__traceback__))
    return Report(rank, host, start, time.time(), error=what, exception=exception, traceback="".join(lines))


def _outside_of_this_file(frames: TracebackType | None) -> TracebackType | None:
    while frames and frames.tb_next and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
