"""Comparisons of parameters that block no step: in programs, in all steps of JAX, and in later steps of PyTorch.

A program does not know how often it has run. So native code counts, see `csrc/engine/executions.h`, and calls `_called`
when the ranks compare. A thread waits for the other ranks and warns.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from horovodish import _native
from horovodish.collectives.consistency import Checksums, is_due
from horovodish.collectives.process_sets import ProcessSet, checked_id
from horovodish.collectives.submission import counted, gather_objects_async
from horovodish.errors import HorovodInternalError, NotInitializedError
from horovodish.gradients.layouts import compare_layouts, difference_of_models, warn_of
from horovodish.launch.failures import Place, place_in_script
from horovodish.runtime import basics
from horovodish.runtime.process import part

THREAD = "horovodish-compare"
_LAST_SECONDS = 5.0
"""How long the end of the engine waits for comparisons. One takes that long only if a rank has left or is stopped."""

readers: dict[str, Callable[[str, list[int], int], None]] = {}
"""By the first word of what a program says of its parameters: gets the rest, where the parameters are, and the number
of the execution, and calls `compare`. The memory is the program's: it is valid until the reader returns."""


class _Comparisons:
    """Attributes:
    threads: that compare.
    last: the last one of them, by process set and reduction.
    """

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.last: dict[tuple[int, str], threading.Thread] = {}


class Model(NamedTuple):
    """The model that a rank trains.

    Attributes:
        kin: what to call it, the same on every rank.
        names, shapes: of the parameters.
        operations: the names of the reductions of their gradients, which follow from the model.
    """

    kin: str
    names: list[str]
    shapes: list[str]
    operations: list[str]


def compare(
    name: str,
    process_set: ProcessSet,
    number: int,
    first: int,
    checksums: Callable[[], Checksums],
    remedy: str,
    place: Place | None = None,
    model: Model | None = None,
    once_for: str = "",
) -> None:
    """Compare the parameters if that is due at this reduction. Collective; does not block.

    At the first reduction the ranks compare their models, if these are given. If the models differ, so do the
    names of the ranks' reductions, and no reduction would find its partners. So each rank refuses the others'.

    Args:
        name: of the reduction, the same on every rank.
        process_set: the ranks that reduce.
        number: of the reduction, from 1, the same on every rank. A rank that had joined goes on from the others'.
        first: the reduction at which they compare first.
        checksums: returns the checksums of this rank's parameters. If it returns none, no rank warns.
        remedy: what to do if the parameters differ.
        place: the line of the script that trains; None: the line that the script is in now.
        model: what this rank trains. Every rank gives it or none does.
        once_for: as for `warn_of`.

    Raises:
        HorovodInternalError, NotInitializedError: the reduction fails as well.
        RuntimeError: the interpreter ends, and takes no more threads.
    """
    identity = checked_id(process_set)
    if number == 1 and model is not None:
        gathered = gather_objects_async(model, f"{model.kin} {counted(model.kin, identity)}: models", identity)
        _in_a_thread(lambda: _refuse_others(gathered.wait(), model, process_set))
    if is_due(number, first):
        own = checksums()
        shown = next(iter(own), "")
        comparison = compare_layouts([], f"{name}, step {number}", process_set, own or None, shown=shown)
        at = place or place_in_script()
        # Of several comparisons, the first one that differs warns.
        key = identity, name
        last = part(_Comparisons).last

        def warn() -> None:
            warn_of(comparison.wait(), own, name, process_set, remedy, at, number, once_for)

        last[key] = _in_a_thread(warn, last.get(key))


def _in_a_thread(function: Callable[[], None], before: threading.Thread | None = None) -> threading.Thread:
    def run() -> None:
        if before is not None:
            before.join()
        with suppress(HorovodInternalError, NotInitializedError):  # the reduction fails as well, and says why
            function()

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name=THREAD, daemon=True)
    thread.start()
    part(_Comparisons).threads.append(thread)
    return thread


def _refuse_others(of_places: dict[int, Model], own: Model, process_set: ProcessSet) -> None:
    text = difference_of_models({place: (each.names, each.shapes) for place, each in of_places.items()}, process_set)
    others = {operation for each in of_places.values() for operation in each.operations} if text else set()
    for operation in sorted(others - {*own.operations}):
        basics.engine().refuse(_native.KINDS["allreduce"], operation, checked_id(process_set), text)


def _called(described: str, addresses: list[int], number: int) -> None:
    framework, _, rest = described.partition(" ")
    # The reduction fails as well. RuntimeError also says that the interpreter ends, and takes no more threads.
    with suppress(RuntimeError, NotInitializedError):
        readers[framework](rest, addresses, number)


def _begin(_: object = None) -> None:
    _native.compare_by(_called)


def _finish() -> None:
    end = time.monotonic() + _LAST_SECONDS
    for thread in part(_Comparisons).threads:
        thread.join(max(0.0, end - time.monotonic()))


def _end() -> None:
    _native.compare_by(None)
    part(_Comparisons).threads.clear()
    part(_Comparisons).last.clear()


basics.follow(started=_begin, finish=_finish, stopped=_end)
if basics.has_engine():
    _begin()
