"""The threads of this process, as the system sees them."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from horovodish.gradients.parameters import THREAD
from support.processes import wait_until


def thread_names() -> dict[int, str]:
    """By number. A thread that was waited for may still be among them for a moment."""
    names = {}
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names[int(path.parent.name)] = path.read_text().strip()
    return names


def await_comparison() -> None:
    """Wait until no thread compares the parameters of the ranks, nor is about to."""
    wait_until(lambda: all(thread.name != THREAD for thread in threading.enumerate()))


def engine_thread() -> int:
    """The number of the engine's own thread.

    It names itself when it first runs. Operations may be over before, because a caller that waits drives the engine.
    """
    while True:
        for number, name in thread_names().items():
            if name == "horovodish" and number != os.getpid():
                return number
        os.sched_yield()
