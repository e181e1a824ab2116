"""A script that ends with an exception that nobody caught: what the other ranks, the launcher and the user are told."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception
from types import TracebackType

from horovodish.errors import RankLostError
from horovodish.mpi import launcher_environment
from horovodish.settings import RUN_DIR_VARIABLE

REPORT_BYTES = 65_000
"""How long a report to the launcher can be: a message to it has 64 KiB."""
LONGEST = 10_000
"""How many characters of an error and of its traceback a report has at most."""

reason: str | None = None
"""Why this process ends early, once it does: "raised ValueError: ..."."""


def watch(rank: Callable[[], int | None]) -> None:
    """From now on, note such an exception, besides what `sys.excepthook` does.

    Args:
        rank: gives the rank of this process, or None when it is none.
    """
    previous, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        global reason
        reason = _encodable(f"raised {kind.__name__}: {value}")
        own = rank() if os.getpid() == process else None  # a forked child is no rank
        is_usual = previous is sys.__excepthook__
        is_told = own is not None and _report(kind, value, traceback if is_usual else None)
        if own is not None and isinstance(value, RankLostError):
            # A consequence: the traceback that matters is the one of the rank that was lost.
            print(f"horovodish: rank {own} ends: {value}", file=sys.stderr, flush=True)
        elif not (is_usual and is_told):
            previous(kind, value, traceback)

    sys.excepthook = hook


def _report(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> bool:
    """Tells the launcher, if there is one, which knows the cause from its consequences on other ranks.

    Args:
        kind: of the exception.
        value: the exception.
        traceback: its, if the launcher shall show it, after everything else and once; None if it is shown here.

    Returns:
        Whether the launcher is told.
    """
    folder, launched = os.environ.get(RUN_DIR_VARIABLE), launcher_environment()
    if folder is None or launched is None:
        return False
    text = "".join(format_exception(kind, value, traceback)) if traceback else ""
    path = Path(folder, f"rank-{launched.rank}.failure")
    try:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(_encoded(time.time(), _encodable(f"{kind.__name__}: {value}"), _encodable(text)))
        unfinished.rename(path)
    except OSError:
        return False  # the launcher is gone
    return True


def _encodable(text: str) -> str:
    """The text as UTF-8 can express it: Python keeps the bytes of a file name in another encoding as surrogates."""
    return text.encode(errors="backslashreplace").decode()


def _encoded(seconds: float, error: str, traceback: str) -> bytes:
    """A report that fits into a message: a character takes up to six bytes."""
    longest = LONGEST
    while True:
        report = {"time": seconds, "error": error[:longest], "traceback": _shortened(traceback, longest)}
        encoded = json.dumps(report, ensure_ascii=False).encode()
        if len(encoded) <= REPORT_BYTES:
            return encoded
        longest //= 2


def _shortened(traceback: str, longest: int) -> str:
    """Its begin and its end: where the exception was raised, even if its message is long, and what it is."""
    half = longest // 2
    return traceback if len(traceback) <= longest else f"{traceback[:half]}\n...\n{traceback[-half:]}"
