"""A script that ends with an exception that nobody caught: what the other ranks, the launcher and the user are told."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception
from types import TracebackType

from horovodish.errors import RankLostError
from horovodish.settings import RUN_DIR_VARIABLE

reason: str | None = None
"""Why this process ends early, once it does: "raised ValueError: ..."."""


def watch(rank: Callable[[], int | None]) -> None:
    """From now on, note such an exception, besides what `sys.excepthook` does.

    Args:
        rank: gives the rank of this process, or None when it is none, such as a forked child.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        global reason
        reason = f"raised {kind.__name__}: {value}"
        own = rank()
        if own is not None:
            _write_report(own, kind, value, traceback)
        if own is not None and isinstance(value, RankLostError):
            # A consequence: the traceback that matters is the one of the rank that was lost.
            print(f"horovodish: rank {own} ends: {value}", file=sys.stderr, flush=True)
        else:
            previous(kind, value, traceback)

    sys.excepthook = hook


def _write_report(rank: int, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    """Tells the launcher, so that it can tell the cause from the consequences on other ranks."""
    folder = os.environ.get(RUN_DIR_VARIABLE)
    if folder is None:
        return
    report = {
        "rank": rank,
        "host": socket.gethostname(),
        "time": time.time(),
        "error": f"{kind.__name__}: {value}",
        "traceback": "".join(format_exception(kind, value, traceback)),
    }
    path = Path(folder, f"rank-{rank}.failure")
    with contextlib.suppress(OSError):  # the launcher is gone, or on another host
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(report))
        unfinished.rename(path)
