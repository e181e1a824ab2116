"""Warnings for ranks that do not come to `init()`.

Nobody can interrupt a call of MPI that waits for them, but another thread can say what it waits for.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from horovodish import settings
from horovodish.errors import SettingError
from horovodish.launch import run_folder
from horovodish.launch.environment import launcher_environment

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["reported", "roll_call", "warning_seconds"]

_HERE, _ALL_HERE = 1, 2  # tags of the roll call
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 20e-6, 5e-3
# A rank that waits for rank 0 leaves it this much more time, because rank 0 can say more.
_PATIENCE = 1.5
_MOST_NAMED = 20


def warning_seconds() -> float:
    """The time after which waiting is reported; 0 where it never is. Bad settings are left to `init()`."""
    if run_folder.is_followed():
        return 0.0  # `horovodish run` names the missing ranks, and what they do
    try:
        knobs = settings.load(warn=lambda _: None)
    except SettingError:
        return 0.0
    return knobs.stall_check_warning_time_seconds if knobs.stall_check else 0.0


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Print what this process waits for if the block takes longer than the warning time.

    Args:
        what: it waits for: the end of "process 123 has waited in init() for 60 s for ...".
    """
    seconds = warning_seconds()
    if seconds <= 0:
        yield
        return
    text = f"process {os.getpid()}{_named()} has waited in init() for {seconds:g} s for {what}"
    timer = threading.Timer(seconds, _warn, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def roll_call(comm: "Intracomm") -> None:
    """Wait until every rank of `comm` has come here. Every rank must call it; it blocks.

    After the warning time rank 0 prints which ranks are missing, and the other ranks print if that is rank 0.

    Args:
        comm: all ranks of the world; nothing else uses it meanwhile.
    """
    if comm.Get_rank() == 0:
        _call_the_roll(comm)
    else:
        _answer(comm)


def _call_the_roll(comm: "Intracomm") -> None:
    others = range(1, comm.Get_size())
    here = [comm.Isend(b"", rank, _HERE) for rank in others]
    answers = {rank: comm.Irecv(bytearray(0), rank, _HERE) for rank in others}
    missing = set(others)

    def report(seconds: float) -> None:
        names = ", ".join(str(rank) for rank in sorted(missing)[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        _warn(f"rank 0 has waited in init() for {seconds:.0f} s: no answer comes from rank(s) {names}{more}")

    def all_here() -> bool:
        missing.difference_update([rank for rank in missing if answers[rank].Test()])
        return not missing

    _wait(all_here, warning_seconds(), report)
    for request in [*here, *(comm.Isend(b"", rank, _ALL_HERE) for rank in others)]:
        request.Wait()


def _answer(comm: "Intracomm") -> None:
    sent = comm.Isend(b"", 0, _HERE)
    root_here = comm.Irecv(bytearray(0), 0, _HERE)
    all_here = comm.Irecv(bytearray(0), 0, _ALL_HERE)

    def report(seconds: float) -> None:
        if not root_here.Test():
            _warn(f"rank {comm.Get_rank()} has waited in init() for {seconds:.0f} s: no answer comes from rank 0")

    _wait(all_here.Test, warning_seconds() * _PATIENCE, report)
    for request in (sent, root_here):
        request.Wait()


def _wait(is_over: Callable[[], bool], limit_seconds: float, report: Callable[[float], None]) -> None:
    began, nap, reported = time.monotonic(), _SHORTEST_NAP_SECONDS, False
    while not is_over():
        waited = time.monotonic() - began
        if 0 < limit_seconds < waited and not reported:
            reported = True
            report(waited)
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_SECONDS)


def _named() -> str:
    launched = launcher_environment()
    return "" if launched is None else f" (rank {launched.rank})"


def _warn(text: str) -> None:
    print(f"horovodish: warning: {text}.", file=sys.stderr, flush=True)
