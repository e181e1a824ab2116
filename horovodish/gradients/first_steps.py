"""Comparisons of parameters that block no step: in compiled programs, and in all steps of JAX.

A program does not know how often it has run. So native code counts, see `csrc/engine/first_executions.h`, and calls
`_called` in the first executions only. A thread waits for the other ranks and warns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from horovodish import _native
from horovodish.collectives.consistency import Checksums
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.submission import Handle, counted
from horovodish.errors import HorovodInternalError, NotInitializedError
from horovodish.gradients.layouts import Comparison, compare_layouts, warn_of
from horovodish.runtime import basics

THREAD = "horovodish-compare"
_LAST_SECONDS = 5.0
"""How long the end of the engine waits for comparisons. One takes that long only if a rank has left or is stopped."""

readers: dict[str, Callable[[str, list[int]], None]] = {}
"""By the first word of what a program says of its parameters: gets the rest, and where the parameters are, and calls
`count`. The memory is the program's: it is valid until the reader returns."""

_threads: list[threading.Thread] = []


def count(name: str, process_set: ProcessSet, number: int, checksums: Callable[[], Checksums], remedy: str) -> None:
    """Count a reduction, and compare the parameters if it has this number. Collective; does not block.

    A rank that had joined goes on from the counts of the others, so that all ranks compare at the same reduction.

    Args:
        name: of the reduction, the same on every rank.
        process_set: the ranks that reduce.
        number: of the reduction at which they compare, from 1.
        checksums: gives those of this rank's parameters. If it gives none, no rank warns.
        remedy: what to do if the parameters differ.

    Raises:
        HorovodInternalError, NotInitializedError: the reduction fails as well.
        RuntimeError: the interpreter ends, and takes no more threads.
    """
    if counted(f"parameters of {name}", checked_id(process_set)) != number:
        return
    own = checksums()
    comparison = compare_layouts([], name, process_set, own or None)
    thread = threading.Thread(target=_warn, args=(comparison, own, name, process_set, remedy), name=THREAD, daemon=True)
    thread.start()
    _threads.append(thread)


def _warn(comparison: Handle[Comparison], own: Checksums, name: str, process_set: ProcessSet, remedy: str) -> None:
    with suppress(HorovodInternalError, NotInitializedError):  # the reduction fails as well, and says why
        warn_of(comparison.wait(), own, name, process_set, remedy)


def _called(described: str, addresses: list[int]) -> None:
    framework, _, rest = described.partition(" ")
    # The reduction fails as well. RuntimeError also says that the interpreter ends, and takes no more threads.
    with suppress(RuntimeError, NotInitializedError):
        readers[framework](rest, addresses)


def _begin(_: object = None) -> None:
    _native.compare_by(_called)


def _finish() -> None:
    end = time.monotonic() + _LAST_SECONDS
    for thread in _threads:
        thread.join(max(0.0, end - time.monotonic()))


def _end() -> None:
    _native.compare_by(None)
    _threads.clear()


basics.follow(started=_begin, finish=_finish, stopped=_end)
if basics.has_engine():
    _begin()
